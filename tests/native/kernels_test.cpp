// Holds the kernels of every instruction set that this CPU has against plain double-precision code, and the
// same rows in other company and on other numbers of threads against themselves, bit for bit. Needs no
// Python, so that it also runs under an emulator and under sanitizers.
//
//     kernels_test [instruction set ...]
//     kernels_test --list     the instruction sets that this CPU has
//
// One line per check: the largest error and its bound. The exit status is 1 if any check failed.
#include <cstdio>
#include <string>

#include "checks.h"

int main(int count, char** names) {
  const std::vector<std::string> here = pt::available_isas();
  const std::vector<std::string> wanted(names + 1, names + count);
  if (wanted == std::vector<std::string>{"--list"}) {
    for (const std::string& isa : here) std::printf("%s\n", isa.c_str());
    return 0;
  }
  for (const std::string& isa : wanted.empty() ? here : wanted) {
    if (std::find(here.begin(), here.end(), isa) == here.end()) {
      std::printf("%s is not available here\n", isa.c_str());
      return 2;
    }
    check::Report report(isa);
    check::products(report);
    check::rounding(report);
    check::rows(report);
    check::attention(report);
    check::sampling(report);
    check::spoilt(report);
    check::choices(report);
    check::layers(report);
    check::recurrent(report);
    if (report.failures()) std::printf("%s: %d checks FAILED\n", isa.c_str(), report.failures());
    check::failures += report.failures();
  }
  check::Report report("pool");
  check::pool(report);
  check::storage(report);
  check::failures += report.failures();
  std::printf(check::failures ? "%d checks FAILED\n" : "all checks passed\n", check::failures);
  return check::failures != 0;
}
