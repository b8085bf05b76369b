// One backend: threads, kernels of one instruction set, workspace. Who computes what, and in which order of
// phases.
#pragma once
#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "edits.h"
#include "kernels.h"
#include "memory.h"
#include "pool.h"

namespace pt {

// Instruction sets that were built and that this CPU has, best first.
std::vector<std::string> available_isas();
// The kernels of one of them; std::invalid_argument for any other name.
const Kernels& kernels_of(const std::string& isa);

struct Weight {
  Matrix matrix;
  Shelf::Place memory;
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

// A mixture of gated MLPs; index e of each vector is expert e. Without a router there is none.
struct ExpertsView {
  const Matrix* router = nullptr;
  std::vector<const Matrix*> gate, up, down;
  int top_k = 0;
  bool normalise = false;
};

// One decoder layer. Vectors are borrowed: the Python object keeps them alive; those that are absent are
// null, as is `gate` where there is none. With experts there are no gate, up and down.
struct LayerView {
  const float *attn_norm, *mlp_norm, *q_norm, *k_norm, *q_bias, *k_bias, *v_bias, *cos, *sin;
  const float *o_bias, *up_bias, *down_bias, *attn_norm_bias, *mlp_norm_bias, *attn_post_norm, *mlp_post_norm;
  const Matrix *q, *k, *v, *o, *gate, *up, *down;
  AttentionShape shape;
  int kv_heads, head_dim, rope_half, rope_rows;
  float eps;
  bool interleaved;
  Act act;
  ExpertsView experts;
};

// KV storage, and where the rows of a batch lie in it.
struct Pages {
  KVView kv;
  BatchView batch;
};

// A decoder below its head: rows of `embed` times a scale, plus those of `positions`, then a norm (absent
// parts are null), then the layers.
struct StackView {
  const Matrix *embed, *positions;
  const float *norm, *norm_bias;
  float scale, eps;
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

struct ChooseRows;  // choose.cpp
struct Piece;

class Engine {
 public:
  Engine(int threads, const std::string& isa);

  std::string isa() const { return kernels_.name; }
  int threads() const { return pool_.size(); }
  void pin_threads(const std::vector<int>& cores) { pool_.pin(cores); }

  std::unique_ptr<Weight> pack(Source source, const uint8_t* data, int n, int k, bool fine);
  void copy_blocks(const KVView&, const int32_t* pairs, int count);

  void embed(const Matrix& table, const int32_t* tokens, Rows out);
  void norm(Rows x, const float* weight, float eps, float* out);  // x as rows of the normed length
  void linear(Rows x, const Matrix& w, const float* bias, float* out);
  void rope(Rows x, const int32_t* positions, const LayerView& shape);  // in place
  void kv_write(const KVView&, int layer, Rows k, const float* v, const int32_t* slots);
  void attention(const float* q, const KVView&, int layer, const BatchView&, const AttentionShape&,
                 float* out);
  void act_mul(Rows gate, const float* up, float* out);
  void layer_norm(Rows x, const float* weight, const float* bias, float eps, float* out);
  void activate(Rows x, Act, float* out);
  void soft_cap(Rows x, float cap, float* out);
  void mul(Rows x, const float* y, float* out);
  void route(Rows logits, int k, bool normalise, int32_t* ids, float* weights);
  void add_rows(Rows y, const int32_t* rows, const float* weights,
                float* x);  // x[rows[i]] += weights[i] * y[i]
  void add(Rows x, const float* y, float* out);

  void attention_block(Rows x, const LayerView&, const KVView&, int index, const BatchView&);
  void mlp_block(Rows x, const LayerView&);  // or the experts in its place
  void logits(Rows x, const HeadView& head, float* out);

  // A whole step: `out` gets the rows `wanted`. With `recent` layers with a window lie there.
  void hidden(const StackView&, const int32_t* tokens, const Pages& whole, const Pages* recent,
              const int32_t* wanted, Rows out);
  // A token for each row of x, from its logits as the edits leave them.
  void choose(Rows x, const HeadView& head, const Choosing&);

  void top_logprobs(Rows logits, int k, float* lse, int32_t* ids, float* logprobs);
  void sample(Rows logits, const SampleRows&, int32_t* out);

 private:
  struct Product {
    const Matrix* w;
    Target to;
  };
  template <class F>
  void each_row(Rows x, const F& f);  // f(row, its data), on all threads
  void normed(const float* x, const float* weight, const float* bias, float eps, int n, float* out) const;
  void take_normed(Rows x, const float* weight, const float* bias, float eps, float* scratch, const Acts& to);
  void add_normed(Rows x, float* y, const float* weight, float eps);
  void attend(Rows x, const LayerView&, const KVView&, int index, const BatchView&, const Wanted*);
  void feed_forward(Rows x, const LayerView&);
  void embed_rows(const StackView&, const int32_t* tokens, const int32_t* positions, Rows x);
  Wanted take_wanted(const BatchView&, const int32_t* rows, Rows out);
  Acts take_acts(int rows, int k, unsigned forms);
  void activate(const Acts&, int row, const float* x) const;
  void products(const Acts&, int rows, const Product* list, int count);
  void dense(Rows x, const LayerView&);
  template <class F>
  void each_expert(const int* starts, int experts, int panels, const F& f);
  void experts_slice(Rows x, const LayerView&);
  void plan_attention(AttentionPlan&, const Attention&, const BatchView&);
  void run_attention(const AttentionPlan&, const Attention&);
  std::vector<SampleScratch> take_sample_scratch(int vocabulary);
  const uint64_t** take_allowed(const Choosing&, int rows, int vocabulary);
  ReadyEdits ready_edits(const Choosing&, int rows, int vocabulary);
  bool finish(const Choosing&, const HeadView&, const ChooseRows&, const Piece&, int place);
  void head_logits(Rows x, const HeadView&, const Choosing&, ChooseRows&);
  void pick(const Choosing&, const ChooseRows&, int place, const SampleScratch&, float* raw);

  const Kernels& kernels_;
  Pool pool_;
  std::mutex one_call_;  // the workspace belongs to one call at a time
  Shelf weights_;
  Arena arena_;       // of one operation
  Arena step_arena_;  // of one step
  AttentionPlan plan_;
};

}  // namespace pt
