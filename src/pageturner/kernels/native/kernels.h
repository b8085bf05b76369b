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
struct f8 {  // e4m3: 4 bits of exponent, 3 of mantissa, no infinity, NaN is all ones
  uint8_t bits;
};

constexpr int kPanel = 16;      // outputs interleaved in one panel of a packed matrix
constexpr int kGroup = 32;      // elements that share a scale in quantised weights and activations
constexpr int kSegment = 256;   // tokens in one partial softmax
constexpr int kTokenTile = 16;  // tokens whose scores are computed together
constexpr int kRowTile = 6;     // rows in the largest register tile

// How a matrix lies packed. F8 and Q8 have a scale per group, Q8Half one for each 16 elements, Table4 a scale
// and the int8 that its 16 nibbles stand for, Q4 and Q5 a scale and a min. Scales and mins are fp16 in Q4, Q5
// and Q8, fp32 in Q8Half and Table4 and what is called Wide. Those called Sym are Q4 and Q5 whose min is -8
// or -16 times the scale, and is not there. Those called K have, as in their files, small integers for scales
// and mins, of which 8 groups share the units; in Q6K these are int8, for each 16 elements. Those before Q8
// multiply with fp32, the others with integers.
// clang-format off
enum class Kind : int {
  F32, F16, BF16, F8, Q8, Q8Half, Q6K, Table4, Q4, Q4Wide, Q4Sym, Q4K, Q5, Q5Sym, Q5K
};
// clang-format on
constexpr int kKinds = int(Kind::Q5K) + 1;
constexpr int kBlock = 8;  // groups that share the units of their scales

constexpr bool nibbles(Kind kind) { return kind >= Kind::Q4; }  // unsigned, with a min; else int8
constexpr bool five_bits(Kind kind) { return kind >= Kind::Q5; }
constexpr bool in_blocks(Kind kind) { return kind == Kind::Q4K || kind == Kind::Q5K || kind == Kind::Q6K; }
constexpr bool symmetric(Kind kind) { return kind == Kind::Q4Sym || kind == Kind::Q5Sym; }
constexpr bool two_scales(Kind kind) { return kind == Kind::Q8Half || kind == Kind::Q6K; }
constexpr bool half_scales(Kind kind) {
  return kind == Kind::Q4 || kind == Kind::Q5 || kind == Kind::Q8 || symmetric(kind);
}

// Bytes of a group of 32 of one panel: integers (and what they stand for), then 16 scales, then 16 mins or
// second scales. Before the first of a block there are 16 fp16, the units of scales, and, but for Q6K, 16 of
// the mins.
constexpr size_t integer_bytes(Kind kind) {
  if (kind == Kind::Table4) return 256 + 16;
  if (kind == Kind::Q6K) return 256 + 128;
  return !nibbles(kind) ? 512 : five_bits(kind) ? 320 : 256;
}
constexpr bool one_scale(Kind kind) {
  return kind == Kind::F8 || kind == Kind::Q8 || kind == Kind::Table4 || symmetric(kind);
}
constexpr size_t group_bytes(Kind kind) {
  const int each = in_blocks(kind) ? 1 : half_scales(kind) ? 2 : 4;
  return integer_bytes(kind) + kPanel * (one_scale(kind) ? 1 : 2) * each;
}
constexpr bool measurable(Kind kind) { return kind == Kind::Q8 || kind == Kind::Q8Half || kind == Kind::Q6K; }
constexpr size_t head_bytes(Kind kind) { return !in_blocks(kind) ? 0 : kind == Kind::Q6K ? 32 : 64; }
// Of two panels, whose groups lie in turns, where those of a block begin, the head of one of them, and one of
// its groups.
constexpr size_t block_at(Kind kind, int group) {
  return 2 * (group / kBlock) * (kBlock * group_bytes(kind) + head_bytes(kind));
}
constexpr size_t head_at(Kind kind, int group, int panel) {
  return block_at(kind, group) + panel * head_bytes(kind);
}
constexpr size_t group_at(Kind kind, int group, int panel) {
  const size_t block = in_blocks(kind) ? block_at(kind, group) + 2 * head_bytes(kind) : 0;
  const int place = in_blocks(kind) ? group % kBlock : group;
  return block + (2 * place + panel) * group_bytes(kind);
}

// How a matrix lies in its file (GGML's names): blocks of `values` elements of a row in `bytes`, packed as
// `kind`. The order is that of _SOURCES in
// native.py. Those from Q4_W on are no GGML types: see files/ggml.py.
// clang-format off
enum class Source : int {
  F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, Q3_K, IQ4_NL, IQ4_XS, MXFP4, TQ1_0, TQ2_0,
  Q4_W, Q8_W, T4_W, F8_W
};
// clang-format on
struct SourceFormat {
  int values, bytes;
  Kind kind;
};
constexpr SourceFormat kSources[] = {
    {1, 4, Kind::F32},       {1, 2, Kind::F16},        {1, 2, Kind::BF16},     {32, 34, Kind::Q8},
    {32, 18, Kind::Q4Sym},   {32, 20, Kind::Q4},       {32, 22, Kind::Q5Sym},  {32, 24, Kind::Q5},
    {256, 144, Kind::Q4K},   {256, 176, Kind::Q5K},    {256, 210, Kind::Q6K},  {256, 110, Kind::Q8Half},
    {32, 18, Kind::Table4},  {256, 136, Kind::Table4}, {32, 17, Kind::Table4}, {256, 54, Kind::Table4},
    {256, 66, Kind::Table4}, {32, 24, Kind::Q4Wide},   {32, 40, Kind::Q8Half}, {32, 36, Kind::Table4},
    {32, 36, Kind::F8},
};
constexpr int kSourceCount = sizeof kSources / sizeof kSources[0];

// Forms of activations that a kind of weights wants to multiply with.
// clang-format off
enum Form : unsigned {
  kFloat = 1, kInt8 = 2, kInt16 = 4, kOffsets = 8, kTwelve = 16, kFifteen = 32, kWords = 64
};
// clang-format on

// A packed matrix [n outputs, k inputs]: panels of 16 outputs over the whole of k. Panels of floats lie one
// behind the other, of quantised weights in pairs whose groups lie in turns.
struct Matrix {
  Kind kind;
  int bits;  // of its activations: 8, 12 or 15 (see Acts)
  int n, k;
  size_t panel_bytes;
  const uint8_t* data;
  const int32_t* order = nullptr;  // [k] of its columns: column i multiplies input order[i]; null: input i
  int panels() const { return (n + 2 * kPanel - 1) / (2 * kPanel) * 2; }  // even: tiles take two
  // A panel of floats; two of integers, of which i is the first: their groups lie in turns.
  const uint8_t* panel(int i) const { return data + panel_bytes * i; }
};

// Rows of activations in each wanted form; forms that nobody wants are null. f32 is row-major with k columns.
// The integers lie group by group, so that the rows of a tile are neighbours: at(row, group) is the place of
// 32 of them, and of what belongs to these: sum is scale * (their sum), offset is -128 times their sum (what
// a product with weights stored 128 too large has to take back), half the same for the first 16.
//
// 15 bits are two terms: row rows + r holds what the rounding of row r left, in 256ths of its steps. There
// q16 holds both as one integer. 12 bits: of each 8 elements the first four, a, and the others, b, share the
// byte c beside their own: a stands for 256 a + c, b for 256 b + 16 c, in 256ths of a step, which is all that
// `scale` counts then. Row rows + r has the 16 bytes c of row r; sums and offsets are of what stands there.
//
// words are the integers once more as bf16, in units of `scale`'s steps and, with more than 8 bits, in two
// terms: a multiple of 256 and what is left, 32 of the first and then 32 of the second. Rows of a group are
// neighbours there too. whole is their sum. There are none for fewer than kWordsFrom rows, for which words of
// the weights would not pay, nor for more than kWordsDepth inputs: both would not stay in L2.
constexpr int kWordsFrom = 48, kWordsDepth = 4096;
struct Acts {
  int k = 0;
  int rows = 0;
  int bits = 8;
  int stride = 0;  // places of a group; half of it is odd, so that groups do not share cache sets
  int terms() const { return bits == 8 ? 1 : 2; }  // integer rows per row
  size_t at(int row, int group) const { return size_t(group) * stride + row; }
  const float* f32 = nullptr;
  int8_t* q8 = nullptr;
  int16_t* q16 = nullptr;
  float* scale = nullptr;
  float* sum = nullptr;
  int32_t* offset = nullptr;
  int32_t* half = nullptr;
  uint16_t* words = nullptr;
  float* whole = nullptr;
  const int32_t* order = nullptr;  // of the matrices: the integers are of elements order[0], order[1] ...
  int words_stride() const { return rows | 1; }                       // odd, as above
  size_t word_bytes() const { return size_t(terms()) * kGroup * 2; }  // of a row in a group
  size_t words_at(int row, int group) const {
    return (size_t(group) * words_stride() + row) * terms() * kGroup;
  }
};

enum class Write { Store, Add };

// The order is that of ACTIVATIONS in base.py, and behind them GATED, which is of a gate and an up, and
// SQUARED.
enum class Act : int { Silu, Gelu, GeluTanh, Relu, ClampedSwiglu, SquaredRelu };

// The first half of an MLP: h = act(gate x + gate_bias) * (up x + bias), or act(up x + bias) where there is
// no gate. more: of up and of gate, what rows of their own add to these before the activation, null for
// others; or null.
struct Hidden {
  const Matrix *gate, *up;
  const float* bias;
  Act act;
  const float* gate_bias = nullptr;
  const float* const* more[2] = {nullptr, nullptr};
};

// Steps of k or of the rank in a panel of an adapter: they come in pairs. Of bf16 a pair lies output by
// output, so that one load gives both: the lower halves of 16 words of 32 bits are the first step, the upper
// ones the second.
constexpr int padded_depth(int depth) { return (depth + 1) / 2 * 2; }

// Rows of a product of adapters: row rows[i] reads x and writes y, both [row - base][ld]. next: the weights
// that will be read behind these, if that is known.
struct LoraRows {
  const int* rows;
  int count, base;
  const float* x;
  int ldx;
  float* y;
  int ldy;
  const uint8_t* next = nullptr;
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
// fp32. kOverread bytes behind it may be read: the last V of a head_dim that is no multiple of 16. A latent
// KV has no V of its own: that of a token is its K, [token][dim].
constexpr size_t kOverread = 64;
// The order is that of KV_TYPES in base.py.
enum class KVType : int { Int8, F16, F32, BF16, F8 };
constexpr int kv_bytes(KVType type) {  // of an element
  return type == KVType::F32 ? 4 : type == KVType::Int8 || type == KVType::F8 ? 1 : 2;
}
struct KVView {
  uint8_t* data;
  int layers, blocks, block_size, kv_heads, head_dim;
  KVType type;
  bool latent = false;
  bool transposed() const { return !latent && block_size % kTokenTile == 0; }
  size_t values() const { return size_t(block_size) * head_dim; }
  size_t head_bytes() const {
    return values() * kv_bytes(type) + (type == KVType::Int8 ? block_size * sizeof(float) : 0);
  }
  size_t to_values() const { return latent ? 0 : head_bytes() * kv_heads; }  // from the K of a head to its V
  size_t block_bytes() const { return (latent ? 1 : 2) * head_bytes() * kv_heads; }
  size_t nbytes() const { return block_bytes() * blocks * layers; }
  uint8_t* block(int layer, int b) const { return data + (size_t(b) * layers + layer) * block_bytes(); }
  uint8_t* k(int layer, int b, int head) const { return block(layer, b) + head * head_bytes(); }
  uint8_t* v(int layer, int b, int head) const { return k(layer, b, head) + to_values(); }
  float* scales(uint8_t* head) const { return (float*)(head + values()); }  // of a K or V as int8
};

// Scores of a query at p and a key at j: scale * (q . k), then soft_cap * tanh(s / soft_cap) where soft_cap >
// 0, plus slopes[head] * (j - p) where there are slopes; with window > 0 only j > p - window are seen, or, if
// chunked, j >= p - p % window. sinks[head] is the score of one more key, whose value is zero.
struct AttentionShape {
  int heads;
  float scale;
  int window = 0;
  float soft_cap = 0;
  const float* slopes = nullptr;
  bool chunked = false;
  const float* sinks = nullptr;
  int first_seen(int position) const {
    if (window <= 0 || position < window) return 0;
    return chunked ? position - position % window : position + 1 - window;
  }
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

// Recurrent layers, in recurrent.h.
struct ConvRows;
struct Gates;
struct GatedNorm;
struct Linear;
struct LinearItem;
struct LinearScratch;
struct ChunkRows;
struct RecurrentSequence;

struct Kernels {
  const char* name;
  unsigned (*form)(const Matrix&);
  size_t (*panel_bytes)(Kind, int k);
  void (*pack)(Source, const uint8_t* src, int n, int k, int panel0, int panel1, uint8_t* dst);
  void (*unpack_row)(const Matrix&, int row, float* out);
  // The Euclidean length of each row of these panels, of kinds that `measurable` names.
  void (*lengths)(const Matrix&, int panel0, int panel1, float* out);
  void (*gemm)(const Matrix&, const Acts&, int row0, int row1, int panel0, int panel1, const Target&);
  void (*hidden)(const Hidden&, const Acts& x, int row0, int row1, int panel0, int panel1, const Acts& out);
  void (*quantise)(const float* x, const Acts&, int row, int col0, int col1);  // x: of col0 .. col1-1
  void (*norm)(const float* x, const float* weight, float eps, int n, float* out);
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int n, float* out);
  void (*silu_mul)(const float* gate, const float* up, int n, float* out);
  void (*clamped_swiglu)(const float* gate, const float* up, int n, float* out);
  void (*activate)(Act, const float* x, int n, float* out);
  void (*soft_cap)(const float* x, float cap, int n, float* out);
  void (*add)(const float* x, const float* y, size_t n, float* out);
  void (*mul)(const float* x, const float* y, size_t n, float* out);
  void (*add_scaled)(const float* x, float factor, size_t n,
                     float* to);  // to += factor * x, the product rounded
  void (*route)(const float* logits, int experts, int k, bool normalise, bool sigmoid, int32_t* ids,
                float* weights);
  void (*rope)(float* x, int heads, int head_dim, const float* cos, const float* sin, int half,
               bool interleaved);
  void (*kv_write)(const KVView&, int layer, int slot, const float* k, const float* v);  // latent: no v
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
  // The products of adapters: y = scale * (A x) for panels of A, y (+)= B x for columns of B.
  void (*lora_first)(Kind, const uint8_t* a, const float* scale, int k, int panels, const LoraRows&);
  void (*lora_second)(Kind, const uint8_t* b, int rank, int columns, bool add, const LoraRows&);
  // Recurrent layers: a convolution of some channels; a row or a head each; products of the keys and queries
  // of a key head, which linear_rows needs.
  void (*conv)(const ConvRows&, const RecurrentSequence&, int channel0, int channel1);
  void (*l2norm)(const float* x, int n, float eps, float scale, float* out);
  void (*gates)(const Gates&, const float* a, const float* b, float* g, float* beta);  // b: or null
  void (*gated_norm)(const GatedNorm&, const float* x, const float* gate, float* out);
  void (*gate_mul)(const float* x, const float* gate, int n, float* out);
  void (*linear_products)(const Linear&, const ChunkRows&, int key_head);
  void (*linear_rows)(const Linear&, const LinearItem&, const LinearScratch&);
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
PT_KERNELS(amx)
PT_KERNELS(amx_emulated)
PT_KERNELS(neon_dotprod)
#undef PT_KERNELS

}  // namespace pt
