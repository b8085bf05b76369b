// Which instruction sets were compiled (PT_HAVE_...), and which of them this CPU has.
#include <stdexcept>

#include "ops.h"
#include "processor.h"

namespace pt {
namespace {

const Kernels* const kCompiled[] = {
// best first
#ifdef PT_HAVE_amx
    &amx::kernels,
#endif
#ifdef PT_HAVE_avx512vnni
    &avx512vnni::kernels,
#endif
#ifdef PT_HAVE_amx_emulated
    &amx_emulated::kernels,
#endif
#ifdef PT_HAVE_avx512vnni256
    &avx512vnni256::kernels,
#endif
#ifdef PT_HAVE_avxvnni
    &avxvnni::kernels,
#endif
#ifdef PT_HAVE_avx2
    &avx2::kernels,
#endif
#ifdef PT_HAVE_neon_dotprod
    &neon_dotprod::kernels,
#endif
#ifdef PT_HAVE_portable
    &portable::kernels,
#endif
};

}  // namespace

std::vector<std::string> compiled_isas() {
  std::vector<std::string> names;
  for (const Kernels* kernels : kCompiled) names.emplace_back(kernels->name);
  return names;
}

std::vector<std::string> available_isas() {
  std::vector<std::string> found;
  for (const Kernels* kernels : kCompiled)
    if (runs_here(kernels->name)) found.emplace_back(kernels->name);
  return found;
}

const Kernels& kernels_of(const std::string& isa) {
  for (const Kernels* kernels : kCompiled)
    if (kernels->name == isa && runs_here(isa)) return *kernels;
  throw std::invalid_argument("instruction set '" + isa + "' is not available here");
}

}  // namespace pt
