// What the C++ files share: shapes and views of memory, and the table of kernels that each instruction set
// fills.
//
// Every kernel works on the range it is given and reduces each output element in one fixed order, so that
// rows, threads, tiles and block sizes cannot change a bit. Who works on which range is decided in ops.cpp.
#pragma once
#include <cstddef>
#include <cstdint>

namespace pt {

struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};

constexpr int kPanel = 16;      // outputs interleaved in one panel of a packed matrix
constexpr int kGroup = 32;      // elements that share a scale in quantised weights and activations
constexpr int kSegment = 256;   // tokens in one partial softmax
constexpr int kTokenTile = 16;  // tokens whose scores are computed together
constexpr int kRowTile = 6;     // rows in the largest register tile

// How a matrix lies packed. Q4 and Q5 have a scale and a min per group, Q8 a scale, Q8Half a scale for each
// 16 elements. These are fp16 in Q4, Q5 and Q8, fp32 in the others.
enum class Kind : int { F32, F16, BF16, Q8, Q8Half, Q4, Q4Wide, Q5, Q5Wide };

constexpr bool nibbles(Kind kind) { return kind >= Kind::Q4; }  // unsigned, with a min; else int8
constexpr bool five_bits(Kind kind) { return kind >= Kind::Q5; }
constexpr bool half_scales(Kind kind) { return kind == Kind::Q4 || kind == Kind::Q5 || kind == Kind::Q8; }

// Bytes of a group of 32 of one panel: integers, then 16 scales, then 16 mins or second scales.
constexpr size_t integer_bytes(Kind kind) { return !nibbles(kind) ? 512 : five_bits(kind) ? 320 : 256; }
constexpr size_t group_bytes(Kind kind) {
  return integer_bytes(kind) + kPanel * (kind == Kind::Q8 ? 1 : 2) * (half_scales(kind) ? 2 : 4);
}

// How a matrix lies in its file (GGML's names): blocks of `values` elements of a row in `bytes`, packed as
// `kind`. Q4_0 becomes Q4 with min = -8 * scale, Q5_0 Q5 with -16 * scale. The order is that of _SOURCES in
// native.py.
enum class Source : int { F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K };
struct SourceFormat {
  int values, bytes;
  Kind kind;
};
constexpr SourceFormat kSources[] = {
    {1, 4, Kind::F32},        {1, 2, Kind::F16},        {1, 2, Kind::BF16},       {32, 34, Kind::Q8},
    {32, 18, Kind::Q4},       {32, 20, Kind::Q4},       {32, 22, Kind::Q5},       {32, 24, Kind::Q5},
    {256, 144, Kind::Q4Wide}, {256, 176, Kind::Q5Wide}, {256, 210, Kind::Q8Half},
};
constexpr int kSourceCount = sizeof kSources / sizeof kSources[0];

// Forms of activations that a kind of weights wants to multiply with.
enum Form : unsigned { kFloat = 1, kInt8 = 2, kInt16 = 4, kFine = 8 };

// A packed matrix [n outputs, k inputs]: panels of 16 outputs, each contiguous over the whole of k.
struct Matrix {
  Kind kind;
  bool fine;  // its activations are rounded to two int8 terms, not to one
  int n, k;
  size_t panel_bytes;
  const uint8_t* data;
  int panels() const { return (n + 2 * kPanel - 1) / (2 * kPanel) * 2; }  // even: some tiles take two
  const uint8_t* panel(int i) const { return data + panel_bytes * i; }
};

// Rows of activations in each wanted form; forms that nobody wants are null. f32 is row-major with k columns.
// The integers lie group by group, so that the rows of a tile are neighbours: at(row, group) is the place of
// 32 of them, and of what belongs to these: sum is scale * (their sum), offset is -128 times their sum (what
// a product with weights stored 128 too large has to take back), half the same for the first 16. With two
// terms row rows + r holds what the rounding of row r left, in 256ths of its steps. Products in one term take
// the first rows alone.
struct Acts {
  int k = 0;
  int rows = 0;
  int terms = 1;   // integer rows per row
  int stride = 0;  // places of a group; half of it is odd, so that groups do not share cache sets
  size_t at(int row, int group) const { return size_t(group) * stride + row; }
  const float* f32 = nullptr;
  int8_t* q8 = nullptr;
  int16_t* q16 = nullptr;
  float* scale = nullptr;
  float* sum = nullptr;
  int32_t* offset = nullptr;
  int32_t* half = nullptr;
};

enum class Write { Store, Add };

// The order is that of ACTIVATIONS in base.py.
enum class Act : int { Silu, Gelu, GeluTanh, Relu };

// The first half of an MLP: h = act(gate x) * (up x), or act(up x + bias) where there is no gate.
struct Hidden {
  const Matrix *gate, *up;
  const float* bias;
  Act act;
};

// Where a product goes: out[row * ld + column], plus bias, stored or added to what is there.
struct Target {
  float* out;
  int ld;
  const float* bias = nullptr;
  Write mode = Write::Store;
};

// Paged KV: [block][layer][K, V][kv head][...], so that blocks nobody uses leave whole pages untouched. V is
// [token][dim]. K is [dim][token] where the block size is a multiple of 16 (a tile of tokens is then one
// load), else [token][dim]. Behind the int8 of each head's K, and of its V, lie the scales of the tokens,
// fp32. kOverread bytes behind it may be read: the last V of a head_dim that is no multiple of 16.
constexpr size_t kOverread = 64;
struct KVView {
  uint8_t* data;
  int layers, blocks, block_size, kv_heads, head_dim;
  int elem;  // bytes per element: 1 is int8, 2 is fp16, 4 is fp32
  bool transposed() const { return block_size % kTokenTile == 0; }
  size_t values() const { return size_t(block_size) * head_dim; }
  size_t head_bytes() const { return values() * elem + (elem == 1 ? block_size * sizeof(float) : 0); }
  size_t block_bytes() const { return 2 * head_bytes() * kv_heads; }
  size_t nbytes() const { return block_bytes() * blocks * layers; }
  uint8_t* block(int layer, int b) const { return data + (size_t(b) * layers + layer) * block_bytes(); }
  uint8_t* k(int layer, int b, int head) const { return block(layer, b) + head * head_bytes(); }
  uint8_t* v(int layer, int b, int head) const { return block(layer, b) + (kv_heads + head) * head_bytes(); }
  float* scales(uint8_t* head) const { return (float*)(head + values()); }  // of a K or V as int8
};

// Scores of a query at p and a key at j: scale * (q . k), then soft_cap * tanh(s / soft_cap) where soft_cap >
// 0, plus slopes[head] * (j - p) where there are slopes; with window > 0 only j > p - window are seen.
struct AttentionShape {
  int heads;
  float scale;
  int window = 0;
  float soft_cap = 0;
  const float* slopes = nullptr;
  int first_seen(int position) const { return window > 0 && position >= window ? position + 1 - window : 0; }
};

// Rows row0 .. row0+rows-1 (tokens) of one sequence, all query heads of one KV head, segments seg0 .. seg1-1;
// or of neighbours whose blocks are those of `seq` in these segments.
// With `partial` set, the states go there instead of the outputs to out: state_floats for each token and
// head.
struct AttnItem {
  int seq, head, row0, rows, seg0, seg1;
  int work;  // about: rows times tokens
  float* partial;
};

struct Attention {
  KVView kv;
  int layer;
  AttentionShape shape;
  int table_width;
  const float* q;  // [T, heads * head_dim]
  float* out;      // same shape
  const int32_t* positions;
  const int32_t* table;
  int heads() const { return shape.heads; }
  int group() const { return heads() / kv.kv_heads; }
  // Where row r of an item, a (token, query head) pair, begins in q and out.
  size_t row_at(const AttnItem& item, int r) const {
    return (size_t(item.row0 + r / group()) * heads() + item.head * group() + r % group()) * kv.head_dim;
  }
};

constexpr int padded(int head_dim) { return (head_dim + 15) / 16 * 16; }
constexpr int state_floats(int head_dim) { return padded(head_dim) + 16; }  // outputs, maximum, sum
constexpr int kScoreStride = kSegment + kTokenTile;  // rows of scores do not fall upon the same cache sets

// Buffers of one thread; `rows` counts (token, query head) pairs.
struct AttnScratch {
  float* q;        // [rows][head_dim], scaled
  float* scores;   // [rows][kScoreStride]
  float* partial;  // [rows][state_floats] of the current segment
  float* state;    // the same of all segments up to it
  float* ktile;    // [head_dim][kTokenTile]
  int* begins;     // [rows] the row sees tokens begins .. limits-1 of the current segment
  int* limits;     // [rows]
};

constexpr int kMaxBlock = 64;  // ids whose largest logit is kept together

// The largest of some logits, and the lowest id that has it.
struct Best {
  float value;
  int32_t id;
};

struct SampleParams {
  float temperature, top_p, min_p, uniform;
  int top_k;
};

// Buffers of one thread for a vocabulary of v: floats and ints hold v each, mass 4096 and one for each block.
struct SampleScratch {
  float* logit;
  float* weight;
  float* maxima;
  int32_t* id;
  int32_t* bucket;
  double* mass;
};

struct Kernels {
  const char* name;
  unsigned (*form)(const Matrix&);
  size_t (*panel_bytes)(Kind, int k);
  void (*pack)(Source, const uint8_t* src, int n, int k, int panel0, int panel1, uint8_t* dst);
  void (*unpack_row)(const Matrix&, int row, float* out);
  void (*gemm)(const Matrix&, const Acts&, int row0, int row1, int panel0, int panel1, const Target&);
  void (*hidden)(const Hidden&, const Acts& x, int row0, int row1, int panel0, int panel1, const Acts& out);
  void (*quantise)(const float* x, const Acts&, int row, int col0, int col1);  // x: of col0 .. col1-1
  void (*norm)(const float* x, const float* weight, float eps, int n, float* out);
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int n, float* out);
  void (*silu_mul)(const float* gate, const float* up, int n, float* out);
  void (*activate)(Act, const float* x, int n, float* out);
  void (*soft_cap)(const float* x, float cap, int n, float* out);
  void (*add)(const float* x, const float* y, size_t n, float* out);
  void (*mul)(const float* x, const float* y, size_t n, float* out);
  void (*add_scaled)(const float* x, float factor, size_t n,
                     float* to);  // to += factor * x, the product rounded
  void (*route)(const float* logits, int experts, int k, bool normalise, int32_t* ids, float* weights);
  void (*rope)(float* x, int heads, int head_dim, const float* cos, const float* sin, int half,
               bool interleaved);
  void (*kv_write)(const KVView&, int layer, int slot, const float* k, const float* v);
  void (*attend)(const Attention&, const AttnItem&, const AttnItem* next, const AttnScratch&);
  void (*merge)(const Attention&, const AttnItem* shared, int shared_count, const AttnItem* own, int count);
  // From here on NaN is larger than every number: a row, a block or a piece with one has it as its largest.
  void (*top_logprobs)(const float* logits, int v, int k, float* lse, int32_t* ids, float* logprobs,
                       const SampleScratch&);
  void (*best_of)(const float* logits, int n, int first_id, Best&);  // merges n logits in, ids ascending
  // Minus infinity where a token's bit is not set: a word of bits for each block of ids, the lowest first.
  void (*forbid)(float* logits, int n, const uint64_t* allowed);
  float (*maxima_of)(const float* logits, int n, float* maxima);  // of each block of ids, and of all
  int (*sample)(const float* logits, int v, const SampleParams&, const float* maxima, const SampleScratch&);
};

#define PT_KERNELS(isa)         \
  namespace isa {               \
  extern const Kernels kernels; \
  }
PT_KERNELS(portable)
PT_KERNELS(avx2)
PT_KERNELS(avxvnni)
PT_KERNELS(avx512vnni256)
PT_KERNELS(avx512vnni)
PT_KERNELS(neon_dotprod)
#undef PT_KERNELS

}  // namespace pt
