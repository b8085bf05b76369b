// Which instruction sets this processor and its operating system run. The build asks too (best_isa.cpp).
#pragma once

#include <string_view>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace pt {

#if defined(__x86_64__)
// A bit of the processor's leaf 7, in the first register.
inline bool has_feature(unsigned leaf, unsigned bit, bool in_edx) {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, leaf, &a, &b, &c, &d) && ((in_edx ? d : a) >> bit & 1u);
}

// Tiles of bf16: in the CPU, and the kernel allows this process to use them (ARCH_REQ_XCOMP_PERM).
inline bool amx_here() {
  constexpr int kRequest = 0x1023, kTileData = 18;
  static const bool here = has_feature(0, 24, true) && has_feature(0, 22, true) &&
                           syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return here;
}
#endif

inline bool runs_here(std::string_view isa) {
#if defined(__x86_64__)
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni");
  if (isa == "amx") return avx512 && amx_here();
  if (isa == "avxvnni") return avx2 && has_feature(1, 4, false);
  if (isa == "avx2") return avx2;
  if (isa != "portable") return avx512;
#elif defined(__aarch64__) && defined(__linux__)
  if (isa == "neon_dotprod") return (getauxval(AT_HWCAP) & (1 << 20)) != 0;  // HWCAP_ASIMDDP
#endif
  return isa == "portable";
}

}  // namespace pt
