// Register tiles of quantised weights by NEON dot products (sdot). Both sides are signed, which nibbles and
// five bits are as well: nothing has to be taken back.
#pragma once
#include "micro_float.h"

namespace pt {
namespace PT_ISA {
namespace {

constexpr int kQ8Step = 4;
constexpr uint8_t kQ8Zero = 0;
constexpr unsigned kQ8Form = kInt8;
template <Kind>
constexpr int kPairRows = 0;           // see micro_avx2.h
constexpr int kQuarters = kPanel / 4;  // vectors of 4 outputs

// Outputs 4v .. 4v+3 of step s of 8 in a group, 4 bytes each.
template <Kind kind>
inline int8x16_t weights_of(const uint8_t* p, int s, int v) {
  if constexpr (kind == Kind::Q8 || kind == Kind::Q8Half)
    return vreinterpretq_s8_u8(vld1q_u8(p + s * 64 + v * 16));
  uint8x16_t w = vld1q_u8(p + s / 2 * 64 + v * 16);
  w = s & 1 ? vshrq_n_u8(w, 4) : vandq_u8(w, vdupq_n_u8(15));
  if constexpr (kind == Kind::Table4) return vreinterpretq_s8_u8(vqtbl1q_u8(vld1q_u8(p + 256), w));
  if constexpr (kind == Kind::Q6K) {  // its two upper bits; a weight is 32 less
    const uint8x16_t high = vld1q_u8(p + 256 + s / 4 * 64 + v * 16);
    const uint8x16_t bits = vandq_u8(vshlq_u8(high, vdupq_n_s8(int8_t(4 - s % 4 * 2))), vdupq_n_u8(0x30));
    return vsubq_s8(vreinterpretq_s8_u8(vorrq_u8(w, bits)), vdupq_n_s8(32));
  }
  if constexpr (five_bits(kind)) {  // 16 bits as bytes of 16 or 0
    const uint8x8_t bit = vcreate_u8(0x8040201008040201);
    const uint8_t* bits = p + 256 + s * 8 + v * 2;
    const uint8x16_t spread = vcombine_u8(vdup_n_u8(bits[0]), vdup_n_u8(bits[1]));
    w = vorrq_u8(w, vandq_u8(vtstq_u8(spread, vcombine_u8(bit, bit)), vdupq_n_u8(16)));
  }
  return vreinterpretq_s8_u8(w);
}

inline int8x8_t four_bytes(const int8_t* p) {  // four bytes, for sdot by element
  uint32_t v;
  std::memcpy(&v, p, 4);
  return vcreate_s8(v);
}

template <int R, Kind kind>
void tile_rows(const uint8_t* p, int panel, int groups, const Acts& acts, int row, float* acc) {
  constexpr int parts = two_scales(kind) ? 2 : 1, steps = 8 / parts;
  std::memset(acc, 0, sizeof(float) * R * kPanel);
  const uint8_t* head = nullptr;
  for (int g = 0; g < groups; g++, p += 2 * group_bytes(kind)) {
    enter_block<kind>(g, panel, p, head);
    const size_t at = acts.at(row, g);
    const int8_t* x = acts.q8 + at * kGroup;
    const float *scale = acts.scale + at, *sum = acts.sum + at;
    const uint8_t* scales = p + integer_bytes(kind);
    PT_UNROLL
    for (int part = 0; part < parts; part++) {
      int32x4_t a[R][kQuarters];
      PT_UNROLL
      for (int r = 0; r < R; r++) PT_UNROLL
      for (int v = 0; v < kQuarters; v++) a[r][v] = vdupq_n_s32(0);
      PT_UNROLL
      for (int s = part * steps; s < (part + 1) * steps; s++) {
        int8x16_t w[kQuarters];
        PT_UNROLL
        for (int v = 0; v < kQuarters; v++) w[v] = weights_of<kind>(p, s, v);
        PT_UNROLL
        for (int r = 0; r < R; r++) {
          const int8x8_t b = four_bytes(x + r * kGroup + s * 4);
          PT_UNROLL
          for (int v = 0; v < kQuarters; v++) {
            a[r][v] = vdotq_lane_s32(a[r][v], w[v], b, 0);
            PT_PIN(a[r][v]);
          }
        }
      }
      PT_UNROLL
      for (int v = 0; v < kQuarters; v++) {
        const VF d = scales_of<kind>(scales, head, part * kPanel + v * W);
        VF m{};
        if constexpr (nibbles(kind)) m = mins_of<kind>(scales, head, v * W);
        PT_UNROLL
        for (int r = 0; r < R; r++) {
          float* to = acc + r * kPanel + v * W;
          VF f = fma((VF)vcvtq_f32_s32(a[r][v]), d * scale[r], load(to));
          if constexpr (nibbles(kind)) f = fma(m, set1(sum[r]), f);
          store(to, f);
        }
      }
    }
  }
}

}  // namespace
}  // namespace PT_ISA
}  // namespace pt
