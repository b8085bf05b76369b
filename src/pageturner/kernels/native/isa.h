// The kernels of one instruction set, PT_ISA. Each is described in kernels.h, where the table is declared.
#pragma once
#include "kernels.h"

namespace pt {
namespace PT_ISA {

// gemm.cpp
unsigned form(const Matrix&);
size_t panel_bytes(Kind, int k);
void pack(Source, const uint8_t* src, int n, int k, int panel0, int panel1, uint8_t* dst);
void unpack_row(const Matrix&, int row, float* out);
void lengths(const Matrix&, int panel0, int panel1, float* out);
void gemm(const Matrix&, const Acts&, int row0, int row1, int panel0, int panel1, const Target&);
void hidden(const Hidden&, const Acts& x, int row0, int row1, int panel0, int panel1, const Acts& out);

// elementwise.cpp
void quantise(const float* x, const Acts&, int row, int col0, int col1);
void quantise_group(const float* x, const Acts&, int row, int rows, int group);  // x: 32 of each row
void norm(const float* x, const float* weight, float eps, int n, float* out);
void activate(Act, const float* x, int n, float* out);
void mul(const float* x, const float* y, size_t n, float* out);
void silu_mul(const float* gate, const float* up, int n, float* out);
void clamped_swiglu(const float* gate, const float* up, int n, float* out);
void add(const float* x, const float* y, size_t n, float* out);
void rope(float* x, int heads, int head_dim, const float* cos, const float* sin, int half, bool interleaved);
void kv_write(const KVView&, int layer, int slot, const float* k, const float* v);

// attention.cpp
void attend(const Attention&, const AttnItem&, const AttnItem* next, const AttnScratch&);
void merge(const Attention&, const AttnItem* shared, int shared_count, const AttnItem* own, int count);

// lora.cpp
void lora_first(Kind, const uint8_t* a, const float* scale, int k, int panels, const LoraRows&);
void lora_second(Kind, const uint8_t* b, int rank, int columns, bool add, const LoraRows&);

// recurrent.cpp
void conv(const ConvRows&, const RecurrentSequence&, int channel0, int channel1);
void l2norm(const float* x, int n, float eps, float scale, float* out);
void gates(const Gates&, const float* a, const float* b, float* g, float* beta);
void gated_norm(const GatedNorm&, const float* x, const float* gate, float* out);
void gate_mul(const float* x, const float* gate, int n, float* out);
void linear_products(const Linear&, const ChunkRows&, int key_head);
void linear_rows(const Linear&, const LinearItem&, const LinearScratch&);

// sample.cpp
void top_logprobs(const float* logits, int v, int k, float* lse, int32_t* ids, float* logprobs,
                  const SampleScratch&);
void best_of(const float* logits, int n, int first_id, Best&);
void forbid(float* logits, int n, const uint64_t* allowed);
float maxima_of(const float* logits, int n, float* maxima);
int sample(const float* logits, int v, const SampleParams&, const float* maxima, const SampleScratch&);

}  // namespace PT_ISA
}  // namespace pt
