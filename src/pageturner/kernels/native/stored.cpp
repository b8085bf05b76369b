// Packed matrices in files: written as they lie in memory, and read back without being packed anew.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <stdexcept>

#include "checksum.h"
#include "ops.h"

namespace pt {
namespace {

constexpr size_t kPiece = size_t(1) << 20;  // bytes that one thread moves at a time

int pieces_of(size_t bytes) { return int((bytes + kPiece - 1) / kPiece); }

// All of a piece, or std::runtime_error. `move` is pread or pwrite.
template <class Move, class Byte>
void whole(const Move& move, Byte* data, size_t bytes, int fd, size_t offset, const char* failed) {
  while (bytes > 0) {
    const ssize_t n = move(fd, data, bytes, off_t(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) throw std::runtime_error(failed);
    data += n, bytes -= size_t(n), offset += size_t(n);
  }
}

}  // namespace

// f(first byte, bytes) of every piece on all threads; then the sum of its checksums, which their order does
// not change. What a thread throws is thrown when all are done.
template <class F>
uint64_t Engine::each_piece(const uint8_t* data, size_t bytes, const F& f) {
  std::atomic<uint64_t> sum{0};
  std::atomic<bool> failed{false};
  pool_.split(pieces_of(bytes), 1, [&](int p0, int p1, int) {
    for (int p = p0; p < p1 && !failed; p++) {
      const size_t at = size_t(p) * kPiece, count = std::min(kPiece, bytes - at);
      try {
        f(at, count);
        sum += xxh64(data + at, count, uint64_t(p));
      } catch (const std::exception&) {
        failed = true;
      }
    }
  });
  if (failed) throw std::runtime_error("a packed weight could not be read or written");
  return sum;
}

uint64_t Engine::store(const Weight& w, int fd, size_t offset) {
  const uint8_t* data = w.matrix.data;
  std::lock_guard lock(one_call_);
  return each_piece(data, w.nbytes(), [&](size_t at, size_t count) {
    whole(::pwrite, data + at, count, fd, offset + at, "write");
  });
}

std::unique_ptr<Weight> Engine::fetch(Kind kind, int bits, int n, int k, bool ordered, int fd, size_t offset,
                                      uint64_t& sum) {
  auto w = std::make_unique<Weight>();
  w->matrix = {kind, bits, n, k, kernels_.panel_bytes(kind, k), nullptr};
  std::lock_guard lock(one_call_);
  w->take(weights_, ordered);
  uint8_t* data = w->memory.data;
  sum = each_piece(data, w->nbytes(), [&](size_t at, size_t count) {
    whole(::pread, data + at, count, fd, offset + at, "read");
  });
  return w;
}

}  // namespace pt
