// The two products of LoRA adapters, h = scale * (A x) and y += B h, in fp32 whatever the weights are kept
// as.
//
// Each h is summed over k in kChains sums, k modulo kChains telling which, that are then added in a fixed
// order; each y over the rank, from first to last. So a row's bits depend on nothing but the row, its adapter
// and the instruction set: tiles of rows and panels only share what is read.
#include <cstddef>
#include <utility>

#include "isa.h"
#include "wide.h"

namespace pt {
namespace PT_ISA {
namespace {

constexpr int kVecs = kPanel / L;
constexpr int kChains = L == 16 ? 4 : 2;  // enough to hide the latency of a row of its own
constexpr int kRows = L == 16 ? 6 : 3;    // of the largest tile: its sums stay in registers
constexpr int kAcross = L == 16 ? 4 : 2;  // panels of the second product at once
constexpr int kAhead = 6 * 1024;          // bytes; weights are read once, from DRAM

// Two steps of 16 outputs, as kernels.h says they lie.
template <class T>
inline void load_pair(const T* w, Wide* first, Wide* second) {
  PT_UNROLL
  for (int v = 0; v < kVecs; v++) first[v] = wide(w + v * L), second[v] = wide(w + kPanel + v * L);
}
typedef uint32_t Words __attribute__((vector_size(L * 4)));
inline void load_pair(const bf16* w, Wide* first, Wide* second) {
  PT_UNROLL
  for (int v = 0; v < kVecs; v++) {
    Words both;
    std::memcpy(&both, w + 2 * v * L, sizeof both);
    first[v] = (Wide)(both << 16), second[v] = (Wide)(both & 0xffff0000u);
  }
}

const float* x_of(const LoraRows& m, int i) { return m.x + size_t(m.rows[i] - m.base) * m.ldx; }
float* y_of(const LoraRows& m, int i) { return m.y + size_t(m.rows[i] - m.base) * m.ldy; }

// R rows by one panel of A.
template <int R, class T>
void first_tile(const T* a, const float* scale, int k, const LoraRows& m, int row, int column) {
  const float* x[R];
  PT_UNROLL
  for (int r = 0; r < R; r++) x[r] = x_of(m, row + r);
  Wide s[R][kChains][kVecs] = {};
  const auto add = [&](const Wide* w, int i, int c) __attribute__((always_inline)) {
    PT_UNROLL
    for (int v = 0; v < kVecs; v++) {
      PT_UNROLL
      for (int r = 0; r < R; r++) {
        s[r][c][v] = fma(w[v], spread(x[r][i + c]), s[r][c][v]);
        PT_PIN(s[r][c][v]);
      }
    }
  };
  int i = 0;
  Wide one[kVecs], other[kVecs];
  for (; i + kChains <= k; i += kChains) {
    if (R == 1)
      for (size_t line = 0; line < kChains * kPanel * sizeof(T); line += 64)
        __builtin_prefetch((const char*)(a + size_t(i) * kPanel) + kAhead + line);
    PT_UNROLL
    for (int c = 0; c < kChains; c += 2) {
      load_pair(a + size_t(i + c) * kPanel, one, other);
      add(one, i, c), add(other, i, c + 1);
    }
  }
  PT_UNROLL
  for (int c = 0; c < kChains; c += 2) {
    if (i + c >= k) break;
    load_pair(a + size_t(i + c) * kPanel, one, other);
    add(one, i, c);
    if (i + c + 1 < k) add(other, i, c + 1);
  }
  PT_UNROLL
  for (int r = 0; r < R; r++) {
    float* y = y_of(m, row + r) + column;
    PT_UNROLL
    for (int v = 0; v < kVecs; v++) {
      Wide total = s[r][0][v] + s[r][1][v];
      if constexpr (kChains == 4) total = total + (s[r][2][v] + s[r][3][v]);
      store(y + v * L, total * wide(scale + v * L));
    }
  }
}

// R rows by P panels of B: columns column .. column + P * 16 - 1, of which `columns` are real.
template <int R, int P, class T>
void second_tile(const T* b, int rank, bool add, const LoraRows& m, int row, int column, int columns) {
  const float* h[R];
  PT_UNROLL
  for (int r = 0; r < R; r++) h[r] = x_of(m, row + r);
  Wide s[R][P][kVecs] = {};
  const int depth = padded_depth(rank);
  const auto step = [&](const Wide* w, int p, int j) __attribute__((always_inline)) {
    PT_UNROLL
    for (int v = 0; v < kVecs; v++) {
      PT_UNROLL
      for (int r = 0; r < R; r++) {
        s[r][p][v] = fma(w[v], spread(h[r][j]), s[r][p][v]);
        PT_PIN(s[r][p][v]);
      }
    }
  };
  for (int j = 0; j < rank; j += 2) {
    PT_UNROLL
    for (int p = 0; p < P; p++) {
      const T* w = b + (size_t(p) * depth + j) * kPanel;
      if (R == 1) __builtin_prefetch((const char*)w + kAhead);
      Wide one[kVecs], other[kVecs];
      load_pair(w, one, other);
      step(one, p, j);
      if (j + 1 < rank) step(other, p, j + 1);
    }
  }
  PT_UNROLL
  for (int r = 0; r < R; r++) {
    float* y = y_of(m, row + r) + column;
    PT_UNROLL
    for (int p = 0; p < P; p++, y += kPanel) {
      if (columns - p * kPanel >= kPanel) {
        PT_UNROLL
        for (int v = 0; v < kVecs; v++) store(y + v * L, add ? wide(y + v * L) + s[r][p][v] : s[r][p][v]);
        continue;
      }
      alignas(64) float line[kPanel];
      for (int v = 0; v < kVecs; v++) store(line + v * L, s[r][p][v]);
      for (int c = 0; c < columns - p * kPanel; c++) y[c] = add ? y[c] + line[c] : line[c];
    }
  }
}

template <class T>
using First = void (*)(const T*, const float*, int, const LoraRows&, int, int);
template <class T>
using Second = void (*)(const T*, int, bool, const LoraRows&, int, int, int);

template <class T, int... R>
void first_of(const T* a, const float* scale, int k, int panels, const LoraRows& m,
              std::integer_sequence<int, R...>) {
  static constexpr First<T> tiles[] = {first_tile<R + 1, T>...};
  for (int p = 0; p < panels; p++, a += size_t(padded_depth(k)) * kPanel)
    for (int row = 0; row < m.count; row += kRows) {
      const int left = m.count - row, rows = left < kRows ? left : kRows;
      tiles[rows - 1](a, scale + p * kPanel, k, m, row, p * kPanel);
    }
}

template <class T, int... R>
void second_of(const T* b, int rank, int columns, bool add, const LoraRows& m,
               std::integer_sequence<int, R...>) {
  static constexpr Second<T> across[] = {second_tile<R + 1, kAcross, T>...};
  static constexpr Second<T> alone[] = {second_tile<R + 1, 1, T>...};
  const int panels = (columns + kPanel - 1) / kPanel;
  for (int row = 0; row < m.count; row += kRows) {
    const int left = m.count - row, rows = left < kRows ? left : kRows;
    for (int p = 0; p < panels;) {
      const bool whole = p + kAcross <= panels;
      (whole ? across : alone)[rows - 1](b + size_t(p) * padded_depth(rank) * kPanel, rank, add, m, row,
                                         p * kPanel, columns - p * kPanel);
      p += whole ? kAcross : 1;
    }
  }
}

constexpr auto kTiles = std::make_integer_sequence<int, kRows>();

}  // namespace

void lora_first(Kind kind, const uint8_t* a, const float* scale, int k, int panels, const LoraRows& m) {
  switch (kind) {
    case Kind::F32: return first_of((const float*)a, scale, k, panels, m, kTiles);
    case Kind::F16: return first_of((const f16*)a, scale, k, panels, m, kTiles);
    default: return first_of((const bf16*)a, scale, k, panels, m, kTiles);
  }
}

void lora_second(Kind kind, const uint8_t* b, int rank, int columns, bool add, const LoraRows& m) {
  switch (kind) {
    case Kind::F32: return second_of((const float*)b, rank, columns, add, m, kTiles);
    case Kind::F16: return second_of((const f16*)b, rank, columns, add, m, kTiles);
    default: return second_of((const bf16*)b, rank, columns, add, m, kTiles);
  }
}

}  // namespace PT_ISA
}  // namespace pt
