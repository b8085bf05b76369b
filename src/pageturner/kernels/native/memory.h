// Memory of the backend: large zeroed buffers on huge pages, parts of memory files, and an arena for what
// lives during one call.
#pragma once
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <vector>

namespace pt {

constexpr size_t kHugePage = size_t(2) << 20;

inline size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// Zeroed, 64-byte aligned, freed with its owner. Under a sanitizer it comes from malloc, so that overflows
// are seen. Or a part of a memory file, as it is, which stays there when its owner has gone.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes) : bytes_(bytes) {
    if (bytes == 0) return;
#ifdef PT_SANITIZE
    data_ = static_cast<uint8_t*>(std::aligned_alloc(64, round_up(bytes, 64)));
    if (!data_) throw std::bad_alloc();
    std::memset(data_, 0, bytes);
#else
    map_aligned();
#endif
  }
  // `offset` is a multiple of a huge page, and the file goes on to the end of the last page of the part.
  Buffer(int fd, size_t offset, size_t bytes) : bytes_(bytes), in_file_(true) {
    struct stat file;
    if (fstat(fd, &file) || offset % kHugePage || size_t(file.st_size) < offset + mapped())
      throw std::invalid_argument("the memory file has no such part");
    map_aligned();
    const int how = MAP_SHARED | MAP_FIXED;
    if (mmap(data_, mapped(), PROT_READ | PROT_WRITE, how, fd, off_t(offset)) == MAP_FAILED) {
      munmap(data_, mapped());
      throw std::bad_alloc();
    }
    madvise(data_, mapped(), MADV_HUGEPAGE);
  }
  Buffer(Buffer&& o) noexcept { *this = std::move(o); }
  Buffer& operator=(Buffer&& o) noexcept {
    std::swap(data_, o.data_);
    std::swap(bytes_, o.bytes_);
    std::swap(huge_, o.huge_);
    std::swap(in_file_, o.in_file_);
    return *this;
  }
  ~Buffer() {
    if (!data_) return;
#ifdef PT_SANITIZE
    if (!in_file_) {
      std::free(data_);
      return;
    }
#endif
    munmap(data_, mapped());
  }
  // Puts what is in a file on huge pages, from its beginning up to `bytes` at least: machines seldom do that
  // by themselves for shared memory. Where they cannot (before Linux 6.1) the pages stay small.
  void take_huge_pages(size_t bytes) {
    constexpr int kCollapse = 25;  // MADV_COLLAPSE, which older headers do not have
    const size_t end = std::min(round_up(bytes, kHugePage), mapped());
    if (!in_file_ || mapped() < kHugePage || end <= huge_) return;
    for (size_t at = huge_; at < end; at += kHugePage)  // one that has no page at all is refused
      (void)*const_cast<volatile uint8_t*>(data_ + at);
    madvise(data_ + huge_, end - huge_, kCollapse);
    huge_ = end;
  }
  uint8_t* data() const { return data_; }
  size_t size() const { return bytes_; }

 private:
  size_t mapped() const { return round_up(bytes_, bytes_ >= kHugePage ? kHugePage : 4096); }
  // Private memory, where it is large aligned to a huge page: mapped larger, then trimmed.
  void map_aligned() {
    const size_t size = mapped(), slack = size >= kHugePage ? kHugePage : 0;
    void* p = mmap(nullptr, size + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    auto* start = static_cast<uint8_t*>(p);
    data_ =
        slack ? reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<uintptr_t>(start), kHugePage)) : start;
    if (data_ > start) munmap(start, size_t(data_ - start));
    if (const size_t tail = slack - size_t(data_ - start)) munmap(data_ + size, tail);
    if (slack) madvise(data_, size, MADV_HUGEPAGE);
  }
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0, huge_ = 0;  // huge_: so much of it was put on huge pages
  bool in_file_ = false;
};

// Zeroed memory of what is kept, packed tightly: few matrices of a small model fill a huge page alone. A
// chunk lives as long as anything in it.
class Shelf {
 public:
  struct Place {
    std::shared_ptr<Buffer> chunk;
    uint8_t* data = nullptr;
  };
  Place take(size_t bytes) {
    bytes = round_up(bytes, 64);
#ifdef PT_SANITIZE
    const size_t fresh = bytes;
#else
    const size_t fresh = round_up(bytes, 8 * kHugePage);
#endif
    if (!chunk_ || used_ + bytes > chunk_->size()) chunk_ = std::make_shared<Buffer>(fresh), used_ = 0;
    used_ += bytes;
    return {chunk_, chunk_->data() + used_ - bytes};
  }

 private:
  std::shared_ptr<Buffer> chunk_;
  size_t used_ = 0;
};

// Hands out memory that is valid until reset(). Grows while calls grow; then the pages stay, already faulted
// in.
class Arena {
 public:
  template <class T>
  T* take(size_t count) {
    const size_t bytes = round_up(count * sizeof(T), 64);
#ifdef PT_SANITIZE
    chunks_.emplace_back(count * sizeof(T));
    return reinterpret_cast<T*>(chunks_.back().data());
#else
    if (chunks_.empty() || used_ + bytes > chunks_.back().size()) {
      chunks_.emplace_back(round_up(bytes, 8 * kHugePage));
      used_ = 0;
    }
    used_ += bytes;
    return reinterpret_cast<T*>(chunks_.back().data() + used_ - bytes);
#endif
  }

  void reset() {
    used_ = 0;
#ifdef PT_SANITIZE
    chunks_.clear();
#else
    if (chunks_.size() < 2) return;
    size_t total = 0;
    for (const Buffer& c : chunks_) total += c.size();
    chunks_.clear();
    chunks_.emplace_back(total);
#endif
  }

 private:
  std::vector<Buffer> chunks_;
  size_t used_ = 0;
};

}  // namespace pt
