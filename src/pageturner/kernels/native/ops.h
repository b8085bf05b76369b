// One backend: threads, kernels of one instruction set, workspace. Who computes what, and in which order of
// phases.
#pragma once
#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "adapters.h"
#include "comm.h"
#include "edits.h"
#include "kernels.h"
#include "memory.h"
#include "pool.h"
#include "recurrent.h"

namespace pt {

// Instruction sets that were built, best first, and those of them that this CPU has.
std::vector<std::string> compiled_isas();
std::vector<std::string> available_isas();
// The kernels of one of them; std::invalid_argument for any other name.
const Kernels& kernels_of(const std::string& isa);

struct Weight {
  Matrix matrix;
  Shelf::Place memory;
  // Of each kMaxBlock outputs, where it was asked for: the largest Euclidean length of their weights.
  mutable std::vector<float> longest;
  // The order of its columns, if it has one, lies behind the panels.
  size_t nbytes() const {
    return matrix.panel_bytes * matrix.panels() + (matrix.order ? sizeof(int32_t) * matrix.k : 0);
  }
  void take(Shelf& shelf, bool ordered) {
    const size_t panels = matrix.panel_bytes * matrix.panels();
    memory = shelf.take(panels + (ordered ? sizeof(int32_t) * matrix.k : 0));
    matrix.data = memory.data;
    matrix.order = ordered ? (const int32_t*)(memory.data + panels) : nullptr;
  }
};

struct KVStore {
  KVView view;
  Buffer memory;
};

struct Rows {  // rows of fp32 activations
  float* data;
  int count, cols;
};

struct BatchView {
  const int32_t *positions, *query_start, *table, *slots;
  int tokens, sequences, table_width;
};

// A mixture of MLPs; index e of each vector is expert e. Without a router there is none. Weights are times
// `scale`, and of what goes in with `weigh_input`; gates and biases are absent where their vectors are empty.
struct ExpertsView {
  const Matrix* router = nullptr;
  std::vector<const Matrix*> gate, up, down;
  int top_k = 0;
  bool normalise = false, sigmoid = false, weigh_input = false;
  float scale = 1;
  const float* router_bias = nullptr;
  std::vector<const float*> gate_bias, up_bias, down_bias;
  Act act = Act::Silu;
};

// What attention over a latent KV has beside q and k (kernels.layer_parts.Latent). Without q_rope there is
// none.
struct LatentView {
  const Matrix *q_rope = nullptr, *k_rope = nullptr;
  const float* norm = nullptr;
  std::vector<const Matrix*> k_up, v_up;
};

// One decoder layer. Vectors are borrowed: the Python object keeps them alive; those that are absent are
// null, as is `gate` where there is none. With experts, gate, up and down are their shared one, or absent.
struct LayerView {
  const float *attn_norm, *mlp_norm, *q_norm, *k_norm, *q_bias, *k_bias, *v_bias, *cos, *sin;
  const float *o_bias, *up_bias, *down_bias, *attn_norm_bias, *mlp_norm_bias, *attn_post_norm, *mlp_post_norm;
  const Matrix *q, *k, *v, *o, *gate, *up, *down;
  AttentionShape shape;
  int kv_heads, head_dim, rope_half;
  int positions;  // that it has tables for
  float eps;
  bool interleaved;
  Act act;
  ExpertsView experts;
  LatentView latent;
  bool wide_norm = false;         // q_norm and k_norm are over all heads together
  const float* temper = nullptr;  // what the query of each position is multiplied by
  float residual = 1;             // the same of what attention and MLP add
  // Of the columns of q, k and v, and of gate and up, see Matrix: those that share their input have the same.
  const int32_t *attn_order = nullptr, *mlp_order = nullptr;
};

// KV storage, and where the rows of a batch lie in it.
struct Pages {
  KVView kv;
  BatchView batch;
};

// A decoder below its head: rows of `embed` times a scale, plus those of `positions`, then a norm (absent
// parts are null), then the layers. Of a vocabulary that ranks share `embed` has the rows from `first` on.
struct StackView {
  const Matrix *embed, *positions;
  const float *norm, *norm_bias;
  float scale, eps;
  int first = 0, vocabulary = 0;
  std::vector<const LayerView*> layers;
};

// The rows that matter behind the K and V of the last layer, as a batch of their own.
struct Wanted {
  const int32_t* rows;
  BatchView batch;
  float* out;  // [rows, d], what attention is added to
};

struct SampleRows {
  const float *temperature, *top_p, *min_p, *uniform;
  const int32_t* top_k;
};

// Which logprobs are wanted of rows, and where they go. All null: none.
struct LogprobsView {
  const int32_t* top;         // of each row: -1, or so many of its likeliest tokens, by its raw logits
  const int32_t* candidates;  // of each row: 0, or so many candidates of a beam search, and no token
  int most_top, most_candidates;
  float *lse, *logprob;  // log-sum-exp of the raw logits; of the chosen token
  int32_t* top_ids;      // [rows, most_top]
  float* top_logprobs;
  int32_t* candidate_ids;  // [rows, most_candidates]
  float* candidate_logprobs;
};

// The output head: a norm (a LayerNorm where it has a bias), a matrix, and then, where soft_cap > 0,
// soft_cap * tanh(x / soft_cap) of each logit.
struct HeadView {
  const float *norm, *norm_bias;
  float eps, soft_cap;
  const Matrix& matrix;
  std::vector<float>& longest;  // of its weight
};

// What `choose` is asked beside the activations and the head, and where its answers go; all by row.
struct Choosing {
  SampleRows draw;
  AllowedView allowed;
  EditsView edits;
  LogprobsView logprobs;
  int32_t* ids;
  float* values;  // the logit of each chosen token, after the edits
};

// How the attention of one batch is divided among threads.
struct AttentionPlan {
  struct Run {
    int first, count;
  };
  std::vector<AttnItem> items;
  std::vector<int> shares;  // first item of each run that one thread takes; the end as last entry
  struct Merge {
    Run shared, own;  // the segments of own's rows, in order; shared, if any, hold other rows beside them
  };
  std::vector<Merge> merges;
  std::vector<AttnScratch> scratch;

  static int rows_of(const Attention& a) {
    return std::max(48 / a.group(), 1) * a.group();
  }  // of an item, at most
  void share(const Attention&, const BatchView&,
             int threads);  // all but the scratch and where partial states go
};

// Pieces of work per thread: enough that a thread which was interrupted does not hold up the others.
constexpr int kPieces = 6;
inline int grain_of(int count, int threads) { return std::max(1, count / (threads * kPieces)); }

// Which of so many pieces of weights is to be the one that is claimed as number i. Few rows wait for the
// weights: each thread has a range, as long as all are equally fast, and reads on where it was.
constexpr int kWaitingRows = 4;
inline int piece_of(int i, int pieces, int rows, int threads) {
  if (rows > kWaitingRows) return i;
  const int lane = i % threads;
  return pieces / threads * lane + std::min(lane, pieces % threads) + i / threads;
}

struct ChooseRows;  // choose.cpp
struct Piece;

class Engine {
 public:
  Engine(int threads, const std::string& isa);

  std::string isa() const { return kernels_.name; }
  int threads() const { return pool_.size(); }
  void pin_threads(const std::vector<int>& cores) { pool_.pin(cores); }
  // From here on layers are slices: what attention and MLP or experts make is the sum over all ranks. A
  // latent KV is not divided.
  void join(Ranks* ranks) { ranks_ = ranks; }
  // From here on `hidden` computes a stage of the layers: rows come from the ranks of the stages before and
  // go to those behind, and the last stage alone writes `out`. Rank 1 is the first stage, rank 0 the last.
  void join_stages(Ranks* ranks) { stages_ = ranks; }

  // order: of the columns, see Matrix; copied.
  std::unique_ptr<Weight> pack(Source source, const uint8_t* data, int n, int k, int bits,
                               const int32_t* order = nullptr);
  // The bytes of a packed matrix to a place in a file, and back: `sum` is then what `store` returned, or else
  // the file holds something else. std::runtime_error where it cannot be read or written.
  uint64_t store(const Weight&, int fd, size_t offset);
  std::unique_ptr<Weight> fetch(Kind, int bits, int n, int k, bool ordered, int fd, size_t offset,
                                uint64_t& sum);
  void copy_blocks(const KVView&, const int32_t* pairs, int count);

  void embed(const Matrix& table, const int32_t* tokens, Rows out);
  void norm(Rows x, const float* weight, float eps, float* out);  // x as rows of the normed length
  void linear(Rows x, const Matrix& w, const float* bias, float* out);
  void rope(Rows x, const int32_t* positions, const LayerView& shape);  // in place
  void kv_write(const KVView&, int layer, Rows k, const float* v, const int32_t* slots);
  void attention(const float* q, const KVView&, int layer, const BatchView&, const AttentionShape&,
                 float* out);
  void act_mul(Rows gate, const float* up, float* out);
  void clamped_swiglu(Rows gate, const float* up, float* out);
  // The columns of each head times a matrix of its own: out [rows, heads * n].
  void head_linear(Rows x, const std::vector<const Matrix*>& heads, float* out);
  void layer_norm(Rows x, const float* weight, const float* bias, float eps, float* out);
  void activate(Rows x, Act, float* out);
  void soft_cap(Rows x, float cap, float* out);
  void mul(Rows x, const float* y, float* out);
  void route(Rows logits, int k, bool normalise, bool sigmoid, int32_t* ids, float* weights);
  void add_rows(Rows y, const int32_t* rows, const float* weights,
                float* x);  // x[rows[i]] += weights[i] * y[i]
  void add(Rows x, const float* y, float* out);

  // Recurrent layers (recurrent.h). The plan's pieces are given their place in the workspace.
  void conv_rows(const RecurrentPlan&, ConvRows);
  void linear_rows(RecurrentPlan&, Linear);
  void l2norm(Strided x, Rows out, int head_dim, float eps, float scale);
  void linear_gates(const Gates&, Strided a, Strided b, int rows, float* g, float* beta);
  void gated_norm(const GatedNorm&, Strided x, Strided gate, Rows out);
  void gate_mul(Strided x, Strided gate, Rows out);

  void attention_block(Rows x, const LayerView&, const KVView&, int index, const BatchView&);
  void mlp_block(Rows x, const LayerView&);  // or the experts in its place
  // x += what the experts of each row make of its row of h, which may be x. ids and weights [rows, top_k]:
  // which ones, in ascending order; null: those that the router chooses.
  void add_experts(Rows x, const float* h, const ExpertsView&, const int32_t* ids, const float* weights);
  // With `adapters`, here and below: that of each row, or null.
  void logits(Rows x, const HeadView& head, float* out, const AdapterView* const* adapters = nullptr);

  // A whole step: `out` gets the rows `wanted`. With `recent` layers with a window lie there. adapters: of
  // each sequence.
  void hidden(const StackView&, const int32_t* tokens, const Pages& whole, const Pages* recent,
              const int32_t* wanted, Rows out, const AdapterView* const* adapters = nullptr);
  // A token for each row of x, from its logits as the edits leave them.
  void choose(Rows x, const HeadView& head, const Choosing&, const AdapterView* const* adapters = nullptr);

  void top_logprobs(Rows logits, int k, float* lse, int32_t* ids, float* logprobs);
  void sample(Rows logits, const SampleRows&, int32_t* out);

 private:
  struct Product {
    const Matrix* w;
    Target to;
  };
  // The adapters of a step: of all rows, and of those that are wanted behind the last K and V.
  struct Adapted {
    const Segments *all, *wanted;
    int layer;
  };
  struct Deltas {
    const float* const* of[2] = {nullptr, nullptr};  // up, gate
  };
  template <class F>
  uint64_t each_piece(const uint8_t* data, size_t bytes, const F& f);
  template <class F>
  void each_row(Rows x, const F& f) {  // f(row, its data), on all threads
    pool_.split(x.count, grain_of(x.count, pool_.size()), [&](int r0, int r1, int) {
      for (int r = r0; r < r1; r++) f(r, x.data + size_t(r) * x.cols);
    });
  }
  void normed(const float* x, const float* weight, const float* bias, float eps, int n, float* out) const;
  void take_normed(Rows x, const float* weight, const float* bias, float eps, float* scratch, const Acts& to);
  void add_behind(Rows x, float* y, const float* norm, const LayerView&);
  void attend(Rows x, const LayerView&, const KVView&, int index, const BatchView&, const Wanted*,
              const Adapted& adapted = {nullptr, nullptr, 0});
  void attend_latent(Rows x, const LayerView&, const KVView&, int index, const BatchView&, const Wanted*);
  void head_products(const float* x, int rows, size_t row_stride, size_t head_stride,
                     const std::vector<const Matrix*>& heads, float* out);
  void feed_forward(Rows x, const LayerView&, const Segments* = nullptr, int layer = 0);
  void embed_rows(const StackView&, const int32_t* tokens, const int32_t* positions, Rows x, const Segments*);
  Lora take_lora(const Segments*, int layer, LoraInput, int first_row, int rows);
  void first(const Lora&, const float* x, int ldx);      // lists its first products
  void second(const Lora&, int out, float* y, int ldy);  // lists one of its second ones, added to y
  Deltas take_deltas(const Lora&, int inner);            // lists those of up and gate
  int order_items();                                     // how many a thread takes at a time
  void run_piece(int piece, int grain);
  void run_items();  // what is listed, as a phase of its own
  void add_embedded(const AdapterView&, int token, float* scratch, float* row) const;
  const Segments* group(Segments&, const AdapterView* const* of_row, int rows);
  void pass_rows(Rows x, int begin, int end);  // from each of these stages to the next
  Wanted take_wanted(const BatchView&, const int32_t* rows, Rows out);
  Acts take_acts(int rows, int k, unsigned forms, const int32_t* order = nullptr);
  void activate(const Acts&, int row, const float* x) const;
  void products(const Acts&, int rows, const Product* list, int count);  // and what stands in items_
  void dense(Rows x, const LayerView&, const Segments*, int layer);
  void dense_slice(Rows x, const Acts& in, const Acts& mid, float* behind, const LayerView&,
                   const Lora& in_lora, const Lora& down_lora);
  template <class F>
  void each_head(int rows, int heads, const F& f) {  // f(row, head), on all threads
    pool_.split(rows * heads, grain_of(rows * heads, pool_.size()), [&](int i0, int i1, int) {
      for (int i = i0; i < i1; i++) f(i / heads, i % heads);
    });
  }
  struct ExpertRows {  // rows begin .. end - 1 of those sorted by expert
    int expert, begin, end;
  };
  template <class Of, class F>
  void each_expert(const std::vector<ExpertRows>&, int panels, const Of& of, const F& f);
  void gather(const Acts& from, const int* rows, int count, const Acts& to);
  void experts_slice(Rows x, const LayerView&);
  void mix_experts(Rows x, const float* h, const ExpertsView&, const int32_t* ids, const float* weights);
  void plan_attention(AttentionPlan&, const Attention&, const BatchView&);
  void run_attention(const AttentionPlan&, const Attention&);
  std::vector<SampleScratch> take_sample_scratch(int vocabulary);
  const uint64_t** take_allowed(const Choosing&, int rows, int vocabulary);
  ReadyEdits ready_edits(const Choosing&, int rows, int vocabulary);
  bool finish(const Choosing&, const HeadView&, const ChooseRows&, const Piece&, int place);
  void head_logits(Rows x, const HeadView&, const Choosing&, ChooseRows&, const AdapterView* const*);
  void ready_coarse(const HeadView&, ChooseRows&);
  void rescore(const HeadView&, ChooseRows&, const Acts& exact, int grain, float* tiles);
  void pick(const Choosing&, const ChooseRows&, int place, const SampleScratch&, float* raw);

  const Kernels& kernels_;
  Pool pool_;
  std::mutex one_call_;      // the workspace belongs to one call at a time
  Ranks* ranks_ = nullptr;   // null: this process has all of each layer
  Ranks* stages_ = nullptr;  // null: this process has all layers
  Shelf weights_;
  Arena arena_;       // of one operation
  Arena step_arena_;  // of one step
  AttentionPlan plan_;
  std::vector<ExpertRows> experts_;
  Segments segments_, wanted_segments_;  // of the rows of a step
  std::vector<LoraItem> items_;          // products of adapters that the next phase has to do
};

}  // namespace pt
