// LoRA adapters as the kernels read them: beside a product W x stands B (A x), where A has `rank` rows.
//
// Products that share their input share one A, whose rows lie one behind the other, so that the input is read
// once. A is packed as panels of 16 rows, [k][16]; B as panels of 16 outputs, [rank][16]; both in the type
// that their file has. What an adapter's products read follows one another in memory, in the order in which a
// step wants it.
#pragma once
#include <vector>

#include "kernels.h"
#include "memory.h"

namespace pt {

// What an A multiplies: the normed rows in front of q, k and v; what attention gives; the normed rows in
// front of gate and up; what is between these and down.
enum class LoraInput : int { Qkv, O, Mlp, Down };
constexpr int kLoraInputs = 4;
constexpr int kLoraOutputs = 3;  // q, k, v; o; up, gate; down

// A second product. Its rows of the shared A begin at `first`. Without b there is none.
struct LoraOutput {
  const uint8_t* b = nullptr;
  int n = 0, rank = 0, first = 0;
};

// The products of one input. Without a there is none. scale: of each row of A, padded to whole panels.
struct LoraProduct {
  const uint8_t* a = nullptr;
  const float* scale = nullptr;
  int k = 0, ranks = 0;
  LoraOutput out[kLoraOutputs];
  int panels() const { return (ranks + kPanel - 1) / kPanel; }
};

struct LoraLayer {
  LoraProduct of[kLoraInputs];
};

// embed: rows of the first factor [V, rank] by token, as a matrix; embed_out what multiplies them.
struct AdapterView {
  Kind kind;  // F32, F16 or BF16
  std::vector<LoraLayer> layers;
  LoraProduct head;
  Matrix embed{};
  LoraOutput embed_out;
  float embed_scale = 0;
};

constexpr size_t bytes_of(Kind kind) { return kind == Kind::F32 ? 4 : 2; }

// A factor as it comes: [n, k], row-major, of the adapter's type.
struct Factor {
  const uint8_t* data;
  int n, k;
};

// One adapted product: B [n, rank] times A [rank, k] times scale.
struct LoraPair {
  Factor a, b;
  float scale;
};

// Memory and views of an adapter. What its file holds is copied.
class Adapter {
 public:
  Adapter(Kind kind, int layers) : view_{kind, std::vector<LoraLayer>(layers), {}, {}, {}, 0} {}
  const AdapterView& view() const { return view_; }
  size_t nbytes() const { return memory_.size(); }
  // What add and add_embed will take, all together: to be asked for first.
  static size_t room(Kind kind, const LoraPair* const* pairs);
  static size_t embed_room(Kind kind, const LoraPair&);
  // On huge pages where that wastes less than three quarters of one: steps read all of it.
  void reserve(size_t bytes) { memory_ = Buffer(bytes < kHugePage / 4 ? bytes : round_up(bytes, kHugePage)); }
  // Up to three products of one input, null where there is none; layer -1: the head.
  void add(int layer, LoraInput input, const LoraPair* const* pairs);
  void add_embed(const LoraPair&);  // its A is given as [V, rank]

 private:
  uint8_t* take(size_t bytes);
  const uint8_t* pack(const Factor* list, int count);
  LoraOutput second(const LoraPair&, int first);

  AdapterView view_;
  Buffer memory_;
  size_t used_ = 0;
};

// Rows with the same adapter: rows[first .. first + count - 1], ascending.
struct Segment {
  const AdapterView* adapter;
  int first, count;
};

// The rows of a batch grouped by adapter; those without one are in no segment.
struct Segments {
  std::vector<Segment> list;
  std::vector<int> rows;
  std::vector<const AdapterView*> of_row;
  void build();  // from of_row
};

// A piece of the first or of the second products of a segment.
struct LoraItem {
  Kind kind;
  bool second;
  const uint8_t* w;    // from its first panel on
  const float* scale;  // of the first product
  int depth;           // k of the first product, rank of the second
  int columns;         // to be made from w on
  bool add;
  LoraRows rows;
};

// The adapted products of one input of a layer (-1: of the head), for the rows first_row .. first_row + rows
// - 1: those listed here are done by whoever runs `items`. h: [rows][width] what the first products make.
struct Lora {
  const Segments* who = nullptr;
  int layer = 0;
  LoraInput input = LoraInput::Qkv;
  int first_row = 0, rows = 0;
  int width = 0;  // 0: no row has an adapter with weights here
  float* h = nullptr;

  const LoraProduct& of(const AdapterView& a) const {
    return layer < 0 ? a.head : a.layers[size_t(layer)].of[int(input)];
  }
  void measure();  // width
  // x and y: rows of this range, the first one being first_row
  void first(const float* x, int ldx, int pieces, std::vector<LoraItem>& items) const;
  void second(int out, float* y, int ldy, bool add, int pieces, std::vector<LoraItem>& items) const;

 private:
  template <class F>
  void each_piece(int pieces, const F& f) const;
};

}  // namespace pt
