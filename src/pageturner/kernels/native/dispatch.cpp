// Which instruction sets were compiled, and which of them this CPU has.
#include <stdexcept>

#include "ops.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace pt {
namespace {

struct Compiled {
  const Kernels* kernels;
  bool here;  // this CPU and this operating system can run them
};

std::vector<Compiled> compiled() {  // best first
  std::vector<Compiled> list;
#ifdef PT_HAVE_AVX2
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni");
  list.push_back({&avx512vnni::kernels, avx512});
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
