// Loads of 32 bytes that the tiles of 256-bit vectors share.
#pragma once
#include "micro_float.h"

namespace pt {
namespace PT_ISA {
namespace {

inline __m256i load_i(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline __m256i broadcast4(const void* p) {  // four bytes into every lane
  int32_t v;
  std::memcpy(&v, p, 4);
  return _mm256_set1_epi32(v);
}
inline __m256i load_table(const void* p) {  // 16 bytes, in both halves
  return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
}

// The two upper bits of the six of step s of 8, in their place: p has those of steps 0 to 3, then, 64 bytes
// on, of 4 to 7.
inline __m256i two_bits(const uint8_t* p, int s) {
  const __m256i high = load_i(p + s / 4 * 64);
  const __m256i there =
      s % 4 < 2 ? _mm256_slli_epi16(high, 4 - s % 4 * 2) : _mm256_srli_epi16(high, s % 4 * 2 - 4);
  return _mm256_and_si256(there, _mm256_set1_epi8(0x30));
}

// 32 bits as bytes of 16 or 0.
inline __m256i expand_bits(const uint8_t* p) {
  const __m256i bit = _mm256_set1_epi64x(int64_t(0x8040201008040201));
  const __m256i byte = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i spread = _mm256_and_si256(_mm256_shuffle_epi8(broadcast4(p), byte), bit);
  return _mm256_and_si256(_mm256_cmpeq_epi8(spread, bit), _mm256_set1_epi8(16));
}

}  // namespace
}  // namespace PT_ISA
}  // namespace pt
