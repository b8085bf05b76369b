// What the machine reaches at most, whatever is computed: the ceilings that kernels are measured against.
#pragma once
#include <cstddef>
#include <string>

namespace pt {

enum class Limit : int { Integer, Float, Read, Copy };

// Operations (a multiply or an add) or bytes per second, all threads together: the best of many short rounds
// within about `seconds`. `bytes` is what each thread reads, or copies from one half to the other, again and
// again. 0 where this instruction set has no such loop. What threads do not share (arithmetic, and memory
// that stays in their own caches) is counted by the time that each was given, so that other processes do not
// count.
double measure_limit(const std::string& isa, Limit what, int threads, size_t bytes, double seconds);

}  // namespace pt
