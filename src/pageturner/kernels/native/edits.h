// Edits of logits: what is done to a row before a token is chosen from it. edits.py defines what each means;
// here they are done fast.
#pragma once
#include <cstddef>
#include <cstdint>

namespace pt {

// The order is that of `Operation` in edits.py. The first three say which tokens may be chosen, the others
// change logits.
enum class Operation : int { Allow, Forbid, Force, Add, Repetition, Frequency, Presence };
constexpr int kOperations = 7;
constexpr bool restricts(Operation o) { return o <= Operation::Force; }
constexpr bool changes_logits(Operation o) { return o >= Operation::Force; }

// One operation on some tokens of one row. Add has a value for each id, the others one.
struct EditView {
  Operation operation;
  int first, count;  // of EditsView::ids
  int first_value;   // of EditsView::values
};

// The edits of row r, in order, are those from starts[r] to starts[r + 1] - 1. Without `list` there are none.
struct EditsView {
  const EditView* list;
  const int32_t* starts;
  const int32_t* ids;
  const float* values;
  int ids_count;
};

// Which tokens each row may have: `words` of 64 bits a row, the lowest id first; null: all of them.
struct AllowedView {
  const uint64_t* bits;
  int words;
};

// Does an edit that restricts to the bits of a row. `scratch` has room for as many.
void restrict_row(const EditsView&, const EditView&, int words, uint64_t* bits, uint64_t* scratch);

// An edit that changes logits, ready to be done to any part of a row: each id once, in ascending order, with
// how often it was there. Of Add each is there as often as it was, with its values.
struct ReadyEdit {
  Operation operation;
  int count;
  float value;
  const int32_t* ids;
  const int32_t* times;
  const float* values;
  bool is_due(int at, int end) const { return at < count && ids[at] < end; }
};

// Those of row r, in order, are the ones from starts[r] to starts[r + 1] - 1.
struct ReadyEdits {
  const ReadyEdit* list;
  const int32_t* starts;
  int of(int row) const { return list ? starts[row + 1] - starts[row] : 0; }
};

// Room for making edits ready.
struct EditScratch {
  uint64_t* seen;   // a bit for each id
  int32_t* counts;  // of each id
};

// Makes an edit ready. `ids` and `times` (or the values, of Add) have room for all of its ids.
ReadyEdit make_ready(const EditsView&, const EditView&, int vocabulary, int32_t* ids, int32_t* times,
                     const EditScratch&);

// The first of its ids that is not below `id`.
int first_from(const ReadyEdit&, int id);

// Does an edit to the logits of the tokens first .. end-1, which are at `logits`. `at` is where it goes on
// among its ids.
void change_logits(const ReadyEdit&, int first, int end, int& at, float* logits);

}  // namespace pt
