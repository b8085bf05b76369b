// Prints the instruction sets that run here, best first, as a list of CMake: the build begins with the first
// that the compiler knows.
#include <cstdio>

#include "processor.h"

int main() {
  for (const char* isa : {"amx", "avx512vnni", "avxvnni", "avx2", "neon_dotprod"})
    if (pt::runs_here(isa)) std::printf("%s;", isa);
  std::printf("portable");
}
