// Which instruction sets were compiled, and which of them this CPU has.
#include <stdexcept>

#include "ops.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif
#if defined(PT_HAVE_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pt {
namespace {

struct Compiled {
  const Kernels* kernels;
  bool here;  // this CPU and this operating system can run them
};

#ifdef PT_HAVE_AMX
// Tiles of bf16: in the CPU, and the kernel allows this process to use them (ARCH_REQ_XCOMP_PERM).
bool amx_here() {
  constexpr int kRequest = 0x1023, kTileData = 18;
  constexpr unsigned kTile = 1u << 24, kBf16 = 1u << 22;
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kTile) && (d & kBf16) &&
         syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}
#endif

std::vector<Compiled> compiled() {  // best first
  std::vector<Compiled> list;
#ifdef PT_HAVE_AVX2
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni");
#ifdef PT_HAVE_AMX
  static const bool amx = avx512 && amx_here();
  list.push_back({&amx::kernels, amx});
#endif
  list.push_back({&avx512vnni::kernels, avx512});
#ifdef PT_HAVE_AMX_EMULATED
  list.push_back({&amx_emulated::kernels, avx512});
#endif
  list.push_back({&avx512vnni256::kernels, avx512});
#ifdef PT_HAVE_AVXVNNI
  list.push_back({&avxvnni::kernels, avx2 && __builtin_cpu_supports("avxvnni")});
#endif
  list.push_back({&avx2::kernels, avx2});
#endif
#ifdef PT_HAVE_NEON
  list.push_back({&neon_dotprod::kernels, (getauxval(AT_HWCAP) & (1 << 20)) != 0});  // HWCAP_ASIMDDP
#endif
  list.push_back({&portable::kernels, true});
  return list;
}

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> found;
  for (const Compiled& c : compiled())
    if (c.here) found.push_back(c.kernels->name);
  return found;
}

const Kernels& kernels_of(const std::string& isa) {
  for (const Compiled& c : compiled())
    if (c.here && c.kernels->name == isa) return *c.kernels;
  throw std::invalid_argument("instruction set '" + isa + "' is not available here");
}

}  // namespace pt
