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
constexpr int kSecondRows = 6;            // of that of the second product, which has no chains
// Panels of the second product at once.
template <int R>
constexpr int kAcross = L == 16 || R == 1 ? 4
                        : R == 2          ? 2
                                          : 1;
constexpr int kAhead = 6 * 1024;  // bytes; weights are read once, from DRAM

// Vector v of one of a pair of steps of 16 outputs, as kernels.h says they lie.
template <class T>
inline Wide step_of(const T* w, int odd, int v) {
  return wide(w + odd * kPanel + v * L);
}
typedef uint32_t Words __attribute__((vector_size(L * 4)));
inline Wide step_of(const bf16* w, int odd, int v) {
  Words both;
  std::memcpy(&both, w + 2 * v * L, sizeof both);
  return odd ? (Wide)(both & 0xffff0000u) : (Wide)(both << 16);
}

// Keeps GCC from holding both steps of a pair in registers, of which the sums need nearly all.
template <class T>
inline const T* again(const T* w) {
  asm("" : "+r"(w));
  return w;
}

// What a thread asks for ahead of its reading: a line further with each line read, and behind the end of its
// piece the beginning of its next one, which memory would else let it wait for.
struct Asked {
  const char *at, *end, *next;
  template <class T>
  Asked(const T* w, size_t values, const uint8_t* next)
      : at((const char*)w + kAhead),
        end(next ? (const char*)(w + values) : nullptr),
        next((const char*)next) {
    if (end && at > end) at = this->next + (at - end), end = nullptr;
  }
  void lines(size_t bytes) {
    for (size_t line = 0; line < bytes; line += 64) __builtin_prefetch(at + line);
    at += bytes;
    if (at >= end && end) at = next, end = nullptr;
  }
};

const float* x_of(const LoraRows& m, int i) { return m.x + size_t(m.rows[i] - m.base) * m.ldx; }
float* y_of(const LoraRows& m, int i) { return m.y + size_t(m.rows[i] - m.base) * m.ldy; }

// R rows by one panel of A.
template <int R, class T>
void first_tile(const T* a, const float* scale, int k, const LoraRows& m, int row, int column, Asked& asked) {
  const float* x[R];
  PT_UNROLL
  for (int r = 0; r < R; r++) x[r] = x_of(m, row + r);
  Wide s[R][kChains][kVecs] = {};
  const auto step = [&](const T* w, int i, int c, int odd) __attribute__((always_inline)) {
    Wide one[kVecs];
    PT_UNROLL
    for (int v = 0; v < kVecs; v++) one[v] = step_of(w, odd, v);
    PT_UNROLL
    for (int r = 0; r < R; r++) {
      const Wide input = spread(x[r][i + c + odd]);
      PT_UNROLL
      for (int v = 0; v < kVecs; v++) {
        s[r][c + odd][v] = fma(one[v], input, s[r][c + odd][v]);
        PT_PIN(s[r][c + odd][v]);
      }
    }
  };
  const bool ask = row == 0;
  int i = 0;
  for (; i + kChains <= k; i += kChains) {
    if (ask) asked.lines(kChains * kPanel * sizeof(T));
    PT_UNROLL
    for (int c = 0; c < kChains; c += 2) {
      const T* w = a + size_t(i + c) * kPanel;
      step(w, i, c, 0), step(again(w), i, c, 1);
    }
  }
  PT_UNROLL
  for (int c = 0; c < kChains; c += 2) {
    if (i + c >= k) break;
    const T* w = a + size_t(i + c) * kPanel;
    step(w, i, c, 0);
    if (i + c + 1 < k) step(w, i, c, 1);
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
void second_tile(const T* b, int rank, bool add, const LoraRows& m, int row, int column, int columns,
                 Asked& asked) {
  const float* h[R];
  PT_UNROLL
  for (int r = 0; r < R; r++) h[r] = x_of(m, row + r);
  Wide s[R][P][kVecs] = {};
  const int depth = padded_depth(rank);
  const auto step = [&](const T* w, int p, int j, int odd) __attribute__((always_inline)) {
    Wide one[kVecs];
    PT_UNROLL
    for (int v = 0; v < kVecs; v++) one[v] = step_of(w, odd, v);
    PT_UNROLL
    for (int r = 0; r < R; r++) {
      const Wide input = spread(h[r][j + odd]);
      PT_UNROLL
      for (int v = 0; v < kVecs; v++) {
        s[r][p][v] = fma(one[v], input, s[r][p][v]);
        PT_PIN(s[r][p][v]);
      }
    }
  };
  const bool ask = row == 0;
  int j = 0;
  for (; j + 2 <= rank; j += 2) {
    if (ask) asked.lines(P * 2 * kPanel * sizeof(T));
    PT_UNROLL
    for (int p = 0; p < P; p++) {
      const T* w = b + (size_t(p) * depth + j) * kPanel;
      step(w, p, j, 0), step(again(w), p, j, 1);
    }
  }
  PT_UNROLL
  for (int p = 0; j < rank && p < P; p++) step(b + (size_t(p) * depth + j) * kPanel, p, j, 0);
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
using First = void (*)(const T*, const float*, int, const LoraRows&, int, int, Asked&);
template <class T>
using Second = void (*)(const T*, int, bool, const LoraRows&, int, int, int, Asked&);

template <class T, int... R>
void first_of(const T* a, const float* scale, int k, int panels, const LoraRows& m,
              std::integer_sequence<int, R...>) {
  static constexpr First<T> tiles[] = {first_tile<R + 1, T>...};
  Asked asked(a, size_t(panels) * padded_depth(k) * kPanel, m.next);
  for (int p = 0; p < panels; p++, a += size_t(padded_depth(k)) * kPanel)
    for (int row = 0; row < m.count; row += kRows) {
      const int left = m.count - row, rows = left < kRows ? left : kRows;
      tiles[rows - 1](a, scale + p * kPanel, k, m, row, p * kPanel, asked);
    }
}

template <class T, int... R>
void second_of(const T* b, int rank, int columns, bool add, const LoraRows& m,
               std::integer_sequence<int, R...>) {
  static constexpr Second<T> across[] = {second_tile<R + 1, kAcross<R + 1>, T>...};
  static constexpr int wide[] = {kAcross<R + 1>...};
  static constexpr Second<T> alone[] = {second_tile<R + 1, 1, T>...};
  const int panels = (columns + kPanel - 1) / kPanel;
  Asked asked(b, size_t(panels) * padded_depth(rank) * kPanel, m.next);
  // A few panels at a time: they stay in L1 for all rows.
  for (int p0 = 0; p0 < panels; p0 += kAcross<1>) {
    const int end = p0 + kAcross<1> < panels ? p0 + kAcross<1> : panels;
    for (int row = 0; row < m.count; row += kSecondRows) {
      const int left = m.count - row, rows = left < kSecondRows ? left : kSecondRows;
      for (int p = p0; p < end;) {
        const bool whole = p + wide[rows - 1] <= end;
        (whole ? across : alone)[rows - 1](b + size_t(p) * padded_depth(rank) * kPanel, rank, add, m, row,
                                           p * kPanel, columns - p * kPanel, asked);
        p += whole ? wide[rows - 1] : 1;
      }
    }
  }
}

constexpr auto kTiles = std::make_integer_sequence<int, kRows>();
constexpr auto kSecondTiles = std::make_integer_sequence<int, kSecondRows>();

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
    case Kind::F32: return second_of((const float*)b, rank, columns, add, m, kSecondTiles);
    case Kind::F16: return second_of((const f16*)b, rank, columns, add, m, kSecondTiles);
    default: return second_of((const bf16*)b, rank, columns, add, m, kSecondTiles);
  }
}

}  // namespace PT_ISA
}  // namespace pt
