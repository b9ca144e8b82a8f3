// Memory of the engine: zeroed pages, and activations as rows in them.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <new>
#include <utility>

namespace llama {

constexpr int kMaxRows = 32;  // of activations in one call of a kernel

inline size_t round_up(size_t x, size_t unit) { return (x + unit - 1) / unit * unit; }

// Zeroed memory, in huge pages where the kernel grants them.
class Memory {
  public:
    Memory() = default;
    explicit Memory(size_t bytes) : bytes_(round_up(std::max<size_t>(bytes, 1), 4096)) {
        void* p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED) throw std::bad_alloc();
        data_ = static_cast<char*>(p);
        if (bytes_ >= size_t(4) << 20) madvise(p, bytes_, MADV_HUGEPAGE);
    }
    Memory(Memory&& other) noexcept { swap(other); }
    Memory& operator=(Memory&& other) noexcept {
        swap(other);
        return *this;
    }
    ~Memory() {
        if (data_) munmap(data_, bytes_);
    }
    template <class T>
    T* as() const {
        return reinterpret_cast<T*>(data_);
    }
    size_t bytes() const { return bytes_; }

  private:
    void swap(Memory& other) {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
    }
    char* data_ = nullptr;
    size_t bytes_ = 0;
};

// Activations, row after row. `stride` counts elements. Columns beyond the width are zeros at first.
template <class T>
struct Rows {
    T* data = nullptr;
    size_t stride = 0;
    T* operator[](size_t row) const { return data + row * stride; }
};

template <class T>
class Activations : public Rows<T> {
  public:
    Activations() = default;
    Activations(size_t rows, size_t width) {
        // Whole register tiles, and one cache line more, so that the 16 rows of a tile lie in different cache sets.
        this->stride = round_up(width, 64) + 64 / sizeof(T);
        memory_ = Memory(round_up(rows, kMaxRows) * this->stride * sizeof(T));
        this->data = memory_.as<T>();
    }
    size_t bytes() const { return memory_.bytes(); }

  private:
    Memory memory_;
};

}  // namespace llama
