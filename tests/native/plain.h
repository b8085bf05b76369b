// What the kernels are held against: numbers, file formats and products written plainly, in double precision.
// Must not include anything of the kernels but their names for shapes and formats.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../../src/pageturner/kernels/native/kernels.h"

namespace plain {

// The nearest bf16 value, ties to even.
inline double rounded_to_bf16(double x) {
  if (x == 0) return 0;
  const double step = std::ldexp(1, std::ilogb(x) - 7);
  return std::nearbyint(x / step) * step;
}

// Uniform numbers by splitmix64: the same on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
  double uniform() { return double(bits() >> 11) * 0x1p-53; }
  // About normal: twelve uniform numbers.
  float normal() {
    double sum = -6;
    for (int i = 0; i < 12; i++) sum += uniform();
    return float(sum);
  }
  std::vector<float> normals(size_t n) {
    std::vector<float> x(n);
    for (float& v : x) v = normal();
    return x;
  }

 private:
  uint64_t state_;
};

inline double half_value(uint16_t h) {
  const int exponent = h >> 10 & 31, fraction = h & 1023;
  const double size = exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
  return h & 0x8000 ? -size : size;
}
inline double half_at(const uint8_t* p) { return half_value(uint16_t(p[0] | p[1] << 8)); }

// The nearest fp16 value, ties to even; |x| < 65504.
inline double rounded_to_half(double x) {
  if (x == 0) return 0;
  const double step = std::ldexp(1, std::max(std::ilogb(x), -14) - 10);
  return std::nearbyint(x / step) * step;
}

inline float float_at(const uint8_t* p) {
  float f;
  std::memcpy(&f, p, 4);
  return f;
}

// The value of an e4m3 that is no NaN; the nearest of them, ties to even.
inline double e4m3_value(uint8_t b) {
  const int exponent = b >> 3 & 15, fraction = b & 7;
  const double size = exponent ? std::ldexp(8 + fraction, exponent - 10) : std::ldexp(fraction, -9);
  return b & 0x80 ? -size : size;
}
inline double rounded_to_e4m3(double x) {
  if (x == 0) return 0;
  const double step = std::ldexp(1, std::max(std::ilogb(x), -6) - 3);
  return std::clamp(std::nearbyint(x / step) * step, -448.0, 448.0);
}

// Element i of a TQ1_0 block: its digits to the base of 3, most significant first, of 5 to the power of 3.
inline int ternary(const uint8_t* b, int i) {
  int byte, digit;
  if (i < 160)
    byte = i % 32, digit = i / 32;
  else if (i < 240)
    byte = 32 + (i - 160) % 16, digit = (i - 160) / 16;
  else
    byte = 48 + (i - 240) % 4, digit = (i - 240) / 4;
  int rest = b[byte];
  for (; digit > 0; digit--) rest = rest * 3 % 256;
  return rest * 3 / 256;
}

// Element i of a block, after GGML's definition of the format.
inline double element(pt::Source source, const uint8_t* b, int i) {
  const auto bit = [](const uint8_t* p, int n) { return p[n / 8] >> n % 8 & 1; };
  const auto nibble = [&](const uint8_t* p) { return i < 16 ? p[i] & 15 : p[i - 16] >> 4; };
  const int g = i / 32;  // of 8 groups in a K block
  const auto k_scale = [&](const uint8_t* p) {
    return g < 4 ? p[g] & 63 : (p[g + 4] & 15) | p[g - 4] >> 6 << 4;
  };
  const auto k_min = [&](const uint8_t* p) { return g < 4 ? p[g + 4] & 63 : p[g + 4] >> 4 | p[g] >> 6 << 4; };
  const auto k_nibble = [&](const uint8_t* p) {
    const uint8_t v = p[i / 64 * 32 + i % 32];
    return i % 64 < 32 ? v & 15 : v >> 4;
  };
  const auto two_bits = [&](const uint8_t* p) { return p[i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3; };
  constexpr int iq4[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  constexpr double e2m1[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  float f;
  uint32_t u;
  switch (source) {
    case pt::Source::F32: std::memcpy(&f, b, 4); return f;
    case pt::Source::F16: return half_at(b);
    case pt::Source::BF16:
      u = uint32_t(b[0] | b[1] << 8) << 16;
      std::memcpy(&f, &u, 4);
      return f;
    case pt::Source::Q8_0: return half_at(b) * int8_t(b[2 + i]);
    case pt::Source::Q4_0: return half_at(b) * (nibble(b + 2) - 8);
    case pt::Source::Q4_1: return half_at(b) * nibble(b + 4) + half_at(b + 2);
    case pt::Source::Q5_0: return half_at(b) * ((nibble(b + 6) | bit(b + 2, i) << 4) - 16);
    case pt::Source::Q5_1: return half_at(b) * (nibble(b + 8) | bit(b + 4, i) << 4) + half_at(b + 2);
    case pt::Source::Q4_K:
      return half_at(b) * k_scale(b + 4) * k_nibble(b + 16) - half_at(b + 2) * k_min(b + 4);
    case pt::Source::Q5_K:
      return half_at(b) * k_scale(b + 4) * (k_nibble(b + 48) | (b[16 + i % 32] >> g & 1) << 4) -
             half_at(b + 2) * k_min(b + 4);
    case pt::Source::Q6_K: {
      const int j = i % 128, low = b[i / 128 * 64 + j % 64], high = b[128 + i / 128 * 32 + j % 32];
      const int q = (j < 64 ? low & 15 : low >> 4) | (high >> j / 32 * 2 & 3) << 4;
      return half_at(b + 208) * int8_t(b[192 + i / 16]) * (q - 32);
    }
    case pt::Source::Q3_K: {
      const int j = i / 16, low = j < 8 ? b[96 + j] & 15 : b[88 + j] >> 4,
                high = b[104 + j % 4] >> j / 4 * 2 & 3;
      const int q = two_bits(b + 32) - (b[i % 32] >> g & 1 ? 0 : 4);
      return half_at(b + 108) * ((low | high << 4) - 32) * q;
    }
    case pt::Source::IQ4_NL: return half_at(b) * iq4[nibble(b + 2)];
    case pt::Source::IQ4_XS: {
      const int low = b[4 + g / 2] >> g % 2 * 4 & 15, high = (b[2] | b[3] << 8) >> 2 * g & 3;
      const uint8_t v = b[8 + 16 * g + i % 16];
      return half_at(b) * ((low | high << 4) - 32) * iq4[i % 32 < 16 ? v & 15 : v >> 4];
    }
    case pt::Source::MXFP4: {
      const int v = nibble(b + 1);
      return std::ldexp(e2m1[v & 7], b[0] - 127) * (v & 8 ? -1 : 1);
    }
    case pt::Source::TQ1_0: return half_at(b + 52) * (ternary(b, i) - 1);
    case pt::Source::TQ2_0: return half_at(b + 64) * (two_bits(b) - 1);
    case pt::Source::Q4_W: return double(float_at(b)) * nibble(b + 8) + float_at(b + 4);
    case pt::Source::Q8_W: return double(float_at(b + i / 16 * 4)) * int8_t(b[8 + i]);
    case pt::Source::T4_W: return double(float_at(b)) * int8_t(b[4 + nibble(b + 20)]);
    case pt::Source::F8_W: return float_at(b) * e4m3_value(b[4 + i]);
  }
  return 0;
}

// A matrix as a file holds it: random integers, scales of about 1/64.
struct Weights {
  pt::Source source;
  int n, k;
  std::vector<uint8_t> bytes;
  std::vector<double> values;  // [n][k]

  Weights(pt::Source s, int outputs, int inputs, uint64_t seed) : source(s), n(outputs), k(inputs) {
    const pt::SourceFormat f = pt::kSources[int(s)];
    Random dice(seed);
    bytes.resize(size_t(n) * (k / f.values) * f.bytes);
    for (size_t at = 0; at < bytes.size(); at += size_t(f.bytes)) {
      for (int i = 0; i < f.bytes; i++) bytes[at + i] = uint8_t(dice.bits());
      fix_floats(bytes.data() + at, dice);
      for (int i = 0; i < f.values; i++) values.push_back(element(s, bytes.data() + at, i));
    }
  }
  double largest(int row) const {
    double most = 0;
    for (int i = 0; i < k; i++) most = std::max(most, std::fabs(values[size_t(row) * k + i]));
    return most;
  }

 private:
  // Gives the floating-point fields of a block values near 1/64: random bits would be anything.
  void fix_floats(uint8_t* b, Random& dice) {
    const auto half = [&](uint8_t* p) {
      p[0] = uint8_t(dice.bits()), p[1] = uint8_t(0x24 | (dice.bits() & 0x80));
    };
    const float x = dice.normal(), first = x / 64, second = dice.normal() / 64;
    uint32_t u;
    std::memcpy(&u, &x, 4);
    switch (source) {
      case pt::Source::F32: std::memcpy(b, &x, 4); break;
      case pt::Source::BF16: b[0] = uint8_t(u >> 16), b[1] = uint8_t(u >> 24); break;
      case pt::Source::F16: half(b), b[1] |= uint8_t(dice.bits() & 0x18); break;
      case pt::Source::Q6_K: half(b + 208); break;
      case pt::Source::Q3_K: half(b + 108); break;
      case pt::Source::TQ1_0: half(b + 52); break;
      case pt::Source::TQ2_0: half(b + 64); break;
      case pt::Source::MXFP4: b[0] = uint8_t(118 + dice.bits() % 6); break;
      case pt::Source::Q4_W:
      case pt::Source::Q8_W: std::memcpy(b + 4, &second, 4); [[fallthrough]];
      case pt::Source::T4_W:
        std::memcpy(b, &first, 4);
        for (int i = 0; source == pt::Source::T4_W && i < 16; i++) b[4 + i] = uint8_t(i * 17 - 128);
        break;
      case pt::Source::F8_W:
        std::memcpy(b, &first, 4);
        for (int i = 4; i < 36; i++) b[i] = (b[i] & 0x7f) == 0x7f ? 0 : b[i];
        break;
      case pt::Source::IQ4_NL:
      case pt::Source::IQ4_XS:
      case pt::Source::Q8_0:
      case pt::Source::Q4_0:
      case pt::Source::Q5_0: half(b); break;
      default: half(b), half(b + 2); break;
    }
  }
};

}  // namespace plain
