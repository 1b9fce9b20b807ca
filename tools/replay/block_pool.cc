#include "tools/replay/block_pool.h"

namespace sparsemla::replay {

BlockPool::BlockPool(int32_t num_blocks) : blocks_(static_cast<size_t>(num_blocks)) {
  for (int32_t block = num_blocks - 1; block > 0; --block) free_.push_back(block);
}

int32_t BlockPool::num_available() const {
  return static_cast<int32_t>(free_.size()) + num_idle_;
}

void BlockPool::Unlink(int32_t block) {
  At(At(block).previous).next = At(block).next;
  At(At(block).next).previous = At(block).previous;
  --num_idle_;
}

int32_t BlockPool::Allocate() {
  int32_t block = kNoBlock;
  if (!free_.empty()) {
    block = free_.back();
    free_.pop_back();
  } else if (num_idle_ > 0) {
    block = At(0).next;
    Unlink(block);
    block_of_key_.erase(At(block).key);
    At(block).key = kNoKey;
  } else {
    return kNoBlock;
  }
  At(block).references = 1;
  return block;
}

int32_t BlockPool::AcquireCached(int64_t key) {
  const auto found = block_of_key_.find(key);
  if (found == block_of_key_.end()) return kNoBlock;
  const int32_t block = found->second;
  if (At(block).references++ == 0) Unlink(block);
  return block;
}

void BlockPool::Publish(int32_t block, int64_t key) {
  if (At(block).key != kNoKey) return;
  if (block_of_key_.emplace(key, block).second) At(block).key = key;
}

void BlockPool::Release(int32_t block) {
  Block& released = At(block);
  if (--released.references > 0) return;
  if (released.key == kNoKey) {
    free_.push_back(block);
    return;
  }
  Block& anchor = At(0);
  released.previous = anchor.previous;
  released.next = 0;
  At(anchor.previous).next = block;
  anchor.previous = block;
  ++num_idle_;
}

}  // namespace sparsemla::replay
