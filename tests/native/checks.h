// The parts of kernels_test.
#pragma once
#include <string>
#include <vector>

#include "fixtures.h"

namespace check {

inline int failures = 0;

// Prints what each check found. Engines of 1, 2, 3 and 7 threads are there for all.
class Report {
 public:
  explicit Report(const std::string& isa);
  // Fails unless error <= bound (NaN fails).
  void error(const std::string& what, double error, double bound);
  void equal(const std::string& what, bool equal);
  int failures() const { return failures_; }

  std::string isa;
  std::vector<std::unique_ptr<pt::Engine>> engines;
  pt::Engine& engine() { return *engines[0]; }
  const pt::Kernels& kernels() const { return pt::kernels_of(isa); }

 private:
  int failures_ = 0;
};

inline bool same(const float* a, const float* b, size_t n) { return !std::memcmp(a, b, n * sizeof(float)); }

void products(Report&);
void rounding(Report&);  // activations to int8, numbers to fp16
void rows(Report&);      // norms, activations, rotary embedding, choice of experts
void attention(Report&);
void sampling(Report&);
void spoilt(Report&);   // logits that are no numbers
void choices(Report&);  // the head, with edits of its logits
void layers(Report&);   // whole blocks, against the portable kernels
void recurrent(Report&);
void pool(Report&);     // of 1 to 64 threads
void storage(Report&);  // in a memory file, and checksums

}  // namespace check
