// The allocator of the paged cache: which blocks are free, who refers to the others, and which hold
// a prefix that a later request may share. Used by the engine; the cache itself lives elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace sparsemla::replay {

inline constexpr int32_t kNoBlock = -1;

// Block 0 is never handed out: engines point padding at it. Blocks nobody refers to are reused in
// the order: those without a known content, then the least recently released.
class BlockPool {
 public:
  // `num_blocks` includes block 0.
  explicit BlockPool(int32_t num_blocks);

  // A block with one reference and no content, or kNoBlock.
  int32_t Allocate();
  // The block that holds `key`, with one more reference, or kNoBlock.
  int32_t AcquireCached(int64_t key);
  bool IsCached(int64_t key) const { return block_of_key_.contains(key); }
  // Declares that the block now holds `key` in full. The first block with a key keeps it.
  void Publish(int32_t block, int64_t key);
  // Drops one reference. A published block stays findable until it is reused.
  void Release(int32_t block);

  int32_t num_blocks() const { return static_cast<int32_t>(blocks_.size()); }
  int32_t num_available() const;  // blocks that Allocate could hand out
  int32_t num_referenced() const { return num_blocks() - 1 - num_available(); }
  int32_t num_cached_idle() const { return num_idle_; }  // unreferenced, content kept
  int32_t references(int32_t block) const { return At(block).references; }

 private:
  static constexpr int64_t kNoKey = -1;

  // Idle published blocks form a ring through block 0, least recently released first.
  struct Block {
    int32_t references = 0;
    int32_t previous = 0;
    int32_t next = 0;
    int64_t key = kNoKey;
  };
  Block& At(int32_t block) { return blocks_[static_cast<size_t>(block)]; }
  const Block& At(int32_t block) const { return blocks_[static_cast<size_t>(block)]; }
  void Unlink(int32_t block);

  std::vector<Block> blocks_;
  std::vector<int32_t> free_;  // unreferenced blocks without content, a stack
  std::unordered_map<int64_t, int32_t> block_of_key_;
  int32_t num_idle_ = 0;
};

}  // namespace sparsemla::replay
