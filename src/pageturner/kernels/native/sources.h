// The blocks of files, taken apart into groups of 32. Layouts as in `ggml-common.h` of llama.cpp, and as
// files/ggml.py has those with scales in fp32.
#pragma once
#include "simd.h"

namespace pt {
namespace PT_ISA {
namespace {

// What nibbles stand for: 4-bit floats, e2m1, times 2; digits of ternary weights; IQ4_NL and IQ4_XS.
constexpr int8_t kE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
constexpr int8_t kTernary[16] = {-1, 0, 1, 2};
constexpr int8_t kIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// 32 elements of one output: value = scale * q + min, or scale * table[q] where there is a table; the second
// scale is that of the last 16. Of F8 q are the bits. Kinds that share units have scales and min (or second
// scale) as small integers instead, and where the units (fp16) are.
struct Group {
  int8_t q[kGroup];
  float scale[2], min;
  const int8_t* table;
  uint8_t small[2];
  const uint8_t* units[2];
};

float half_at(const uint8_t* p) {
  f16 h;
  std::memcpy(&h, p, 2);
  return to_float(h);
}

float float_at(const uint8_t* p) {
  float x;
  std::memcpy(&x, p, 4);
  return x;
}

// Nibbles of 16 bytes, as GGML has them: low ones are elements 0..15, high ones 16..31. `fifth`: 32 more
// bits.
void read_nibbles(const uint8_t* qs, const uint8_t* fifth, int8_t* q) {
  uint32_t high = 0;
  if (fifth) std::memcpy(&high, fifth, 4);
  for (int j = 0; j < 16; j++) {
    q[j] = int8_t((qs[j] & 15) | (high >> j & 1) << 4);
    q[j + 16] = int8_t((qs[j] >> 4) | (high >> (j + 16) & 1) << 4);
  }
}

// Group i of 8 in a Q4_K or Q5_K block: d, e, 12 bytes of 6-bit scales and mins, [32 bytes of fifth bits],
// nibbles.
void read_k_group(const uint8_t* b, bool five, int i, Group& out) {
  const uint8_t *p = b + 4, *qs = b + (five ? 48 : 16) + i / 2 * 32;
  const int s = i < 4 ? p[i] & 63 : (p[i + 4] & 15) | (p[i - 4] >> 6 << 4);
  const int m = i < 4 ? p[i + 4] & 63 : p[i + 4] >> 4 | (p[i] >> 6 << 4);
  out.small[0] = uint8_t(s), out.small[1] = uint8_t(m);
  out.units[0] = b, out.units[1] = b + 2;
  for (int j = 0; j < kGroup; j++) {
    const int fifth = five ? b[16 + j] >> i & 1 : 0;
    out.q[j] = int8_t((i & 1 ? qs[j] >> 4 : qs[j] & 15) | fifth << 4);
  }
}

// Group i of 8 in a Q6_K block: 128 bytes of nibbles, 64 of two high bits, 16 int8 scales, d.
void read_q6_group(const uint8_t* b, int i, Group& out) {
  const uint8_t *low = b + i / 4 * 64 + i % 2 * 32, *high = b + 128 + i / 4 * 32;
  for (int j = 0; j < kGroup; j++) {
    const int nibble = i % 4 < 2 ? low[j] & 15 : low[j] >> 4;
    out.q[j] = int8_t(nibble | (high[j] >> (i % 4 * 2) & 3) << 4);  // 32 too large
  }
  out.small[0] = b[192 + 2 * i], out.small[1] = b[193 + 2 * i];
  out.units[0] = b + 208;
}

// Group i of 8 in a Q3_K block: 32 bytes of third bits, 64 of two low bits, 16 scales of 6 bits, d. Of the
// scales 8 bytes have the low nibbles of 0..7 and of 8..15, 4 bytes two high bits of four each.
void read_q3_group(const uint8_t* b, int i, Group& out) {
  const uint8_t *low = b + 32 + i / 4 * 32, *scales = b + 96;
  for (int j = 0; j < kGroup; j++) out.q[j] = int8_t((low[j] >> (i % 4 * 2) & 3) + (b[j] >> i & 1) * 4 - 4);
  for (int h = 0; h < 2; h++) {
    const int s = 2 * i + h, nibble = s < 8 ? scales[s] & 15 : scales[s - 8] >> 4;
    const int high = scales[8 + s % 4] >> (s / 4 * 2) & 3;
    out.scale[h] = half_at(b + 108) * float((nibble | high << 4) - 32);
  }
}

// Group i of 8 in an IQ4_XS block: d, 16 bits of high and 4 bytes of low bits of scales, nibbles.
void read_iq4_group(const uint8_t* b, int i, Group& out) {
  const int low = b[4 + i / 2] >> i % 2 * 4 & 15, high = (b[2] | b[3] << 8) >> 2 * i & 3;
  out.scale[0] = half_at(b) * float((low | high << 4) - 32);
  out.table = kIq4;
  read_nibbles(b + 8 + 16 * i, nullptr, out.q);
}

// Group i of 8 in a TQ1_0 block: bytes are fractions of 256, of which digit n to the base of 3 is an element.
// The digits of 32 bytes are 5 times 32 elements, those of 16 more 5 times 16, those of 4 more 4 times 4.
void read_tq1_group(const uint8_t* b, int i, Group& out) {
  constexpr uint8_t powers[] = {1, 3, 9, 27, 81};
  for (int j = 0; j < kGroup; j++) {
    int byte = j, digit = i;
    if (i == 7 && j >= 16)
      byte = 48 + j % 4, digit = (j - 16) / 4;
    else if (i >= 5)
      byte = 32 + j % 16, digit = 2 * (i - 5) + j / 16;
    const uint8_t rest = uint8_t(b[byte] * powers[digit]);
    out.q[j] = int8_t(rest * 3 >> 8);
  }
  out.scale[0] = half_at(b + 52);
  out.table = kTernary;
}

void read_tq2_group(const uint8_t* b, int i, Group& out) {
  for (int j = 0; j < kGroup; j++) out.q[j] = int8_t(b[i / 4 * 32 + j] >> (i % 4 * 2) & 3);
  out.scale[0] = half_at(b + 64);
  out.table = kTernary;
}

// A power of two of 8 bits, halved: 2^(e - 128).
float half_power(uint8_t e) { return bits_to_float(e < 2 ? 0x00200000u << e : uint32_t(e - 1) << 23); }

// The kinds whose scales are fp32.
void read_wide_group(Source source, const uint8_t* b, Group& out) {
  out.scale[0] = out.scale[1] = float_at(b), out.min = 0;
  switch (source) {
    case Source::Q4_W: read_nibbles(b + 8, nullptr, out.q), out.min = float_at(b + 4); break;
    case Source::Q8_W: std::memcpy(out.q, b + 8, kGroup), out.scale[1] = float_at(b + 4); break;
    case Source::T4_W: read_nibbles(b + 20, nullptr, out.q), out.table = (const int8_t*)b + 4; break;
    default: std::memcpy(out.q, b + 4, kGroup); break;
  }
}

// Group i of the block b.
void read_group(Source source, const uint8_t* b, int i, Group& out) {
  if (source >= Source::Q4_W) return read_wide_group(source, b, out);
  out.scale[0] = out.scale[1] = half_at(b), out.min = 0;
  switch (source) {
    case Source::Q8_0: std::memcpy(out.q, b + 2, kGroup); break;
    case Source::Q4_0: read_nibbles(b + 2, nullptr, out.q); break;
    case Source::Q4_1: read_nibbles(b + 4, nullptr, out.q), out.min = half_at(b + 2); break;
    case Source::Q5_0: read_nibbles(b + 6, b + 2, out.q); break;
    case Source::Q5_1: read_nibbles(b + 8, b + 4, out.q), out.min = half_at(b + 2); break;
    case Source::Q4_K: read_k_group(b, false, i, out); break;
    case Source::Q5_K: read_k_group(b, true, i, out); break;
    case Source::Q6_K: read_q6_group(b, i, out); break;
    case Source::Q3_K: read_q3_group(b, i, out); break;
    case Source::IQ4_NL: read_nibbles(b + 2, nullptr, out.q), out.table = kIq4; break;
    case Source::IQ4_XS: read_iq4_group(b, i, out); break;
    case Source::MXFP4:
      read_nibbles(b + 1, nullptr, out.q), out.scale[0] = half_power(b[0]), out.table = kE2m1;
      break;
    case Source::TQ1_0: read_tq1_group(b, i, out); break;
    case Source::TQ2_0: read_tq2_group(b, i, out); break;
    default: break;
  }
}

}  // namespace
}  // namespace PT_ISA
}  // namespace pt
