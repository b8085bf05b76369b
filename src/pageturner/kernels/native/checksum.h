// Checksums of KV blocks: XXH64 (xxHash by Yann Collet, written from its specification), which is about as
// fast as memory without any special instruction, and the same everywhere.
#pragma once
#include "kernels.h"

namespace pt {

uint64_t xxh64(const uint8_t* data, size_t bytes, uint64_t seed);

// Of each of these blocks, all layers of it, begun with its seed. By so many threads, which end with the
// call.
void block_sums(const KVView&, const int32_t* blocks, const uint64_t* seeds, size_t count, int threads,
                uint64_t* sums);

}  // namespace pt
