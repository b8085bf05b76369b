// Edits of logits: what is done to a row before a token is chosen from it. What each means is defined in
// base.py (`Edit`) and, as code, in edits.py; here they are done fast.
#pragma once
#include <cstddef>
#include <cstdint>

namespace pt {

// The order is that of `Operation` in base.py. The first three say which tokens may be chosen, the others
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
};

// Which tokens each row may have: `words` of 64 bits a row, the lowest id first; null: all of them.
struct AllowedView {
  const uint64_t* bits;
  int words;
  const uint64_t* row(int r) const { return bits ? bits + size_t(r) * words : nullptr; }
};

inline bool is_set(const uint64_t* bits, int i) { return bits[i / 64] >> (i % 64) & 1; }

// Does an edit that restricts to the bits of a row. `scratch` has room for as many.
void restrict_row(const EditsView&, const EditView&, int words, uint64_t* bits, uint64_t* scratch);

// Does an edit that changes logits to those of a row that `bits` allow (null: all), and notes in `touched`
// the blocks of 64 ids where it may have done so, a bit for each. `counts` has room for the vocabulary.
void change_row(const EditsView&, const EditView&, const uint64_t* bits, float* row, int32_t* counts,
                uint64_t* touched);

}  // namespace pt
