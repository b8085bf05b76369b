// The register tile of float weights, by GCC's vectors alone, and what all tiles share.
#pragma once
#include <type_traits>

#include "simd.h"

namespace pt {
namespace PT_ISA {
namespace {

template <int R, class T>
void tile_float(const T* w, int k, const float* x, float* acc) {
  VF a[R][kPanelVecs] = {};
  for (int i = 0; i < k; i++, w += kPanel) {
    VF b[kPanelVecs];
    PT_UNROLL
    for (int v = 0; v < kPanelVecs; v++) b[v] = load(w + v * W);
    PT_UNROLL
    for (int r = 0; r < R; r++) {
      VF s = set1(x[size_t(r) * k + i]);
      PT_UNROLL
      for (int v = 0; v < kPanelVecs; v++) {
        a[r][v] = fma(b[v], s, a[r][v]);
        PT_PIN(a[r][v]);
      }
    }
  }
  PT_UNROLL
  for (int r = 0; r < R; r++) PT_UNROLL
  for (int v = 0; v < kPanelVecs; v++) store(acc + r * kPanel + v * W, a[r][v]);
}

// The type of the scales (and mins) of a quantised kind.
template <Kind kind>
using Scale = std::conditional_t<half_scales(kind), f16, float>;

}  // namespace
}  // namespace PT_ISA
}  // namespace pt
