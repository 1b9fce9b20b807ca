// Memory for large arrays: 64-byte aligned, as workspaces must be, and not touched on creation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <span>

namespace sparsemla::replay {

template <typename T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t count)
      : data_(static_cast<T*>(::operator new(static_cast<size_t>(count) * sizeof(T), kAlignment))),
        count_(static_cast<size_t>(count)) {}

  T* data() const { return data_.get(); }
  size_t bytes() const { return count_ * sizeof(T); }
  T* row(int64_t index, int64_t width) const { return data_.get() + index * width; }
  std::span<T> first(int64_t count) const { return {data_.get(), static_cast<size_t>(count)}; }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(T* data) const { ::operator delete(data, kAlignment); }
  };
  std::unique_ptr<T, Free> data_;
  size_t count_ = 0;
};

}  // namespace sparsemla::replay
