// Items that are attended together: which ones, and that their rows have the answers they have
// alone. docs/numerics.md N3, N4, N5, N7, N8, N12.
#include "cpu/row_groups.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>

#include "tests/kernel_test.h"
#include "tests/plan_testing.h"

namespace sparsemla::test {
namespace {

using cpu::AttentionGroup;
using cpu::AttentionItem;
using cpu::ChooseGroup;
using cpu::RunOfItems;
using cpu::UnionScratch;
using Rows = std::vector<std::vector<int32_t>>;

// ---- which items --------------------------------------------------------------------------------

constexpr int64_t kNumSlots = 100000;

// `num_rows` rows of `num_keys` slots, a part of which all of them share; every row in an order of
// its own.
Rows RowsInCommon(int num_rows, int num_keys, double in_common, std::span<const int32_t> slots,
                  uint32_t seed) {
  std::mt19937 random(seed);
  const auto num_common = static_cast<size_t>(std::lround(in_common * num_keys));
  const size_t num_own = static_cast<size_t>(num_keys) - num_common;
  EXPECT_GE(slots.size(), num_common + static_cast<size_t>(num_rows) * num_own);
  Rows rows;
  for (size_t r = 0; r < static_cast<size_t>(num_rows); ++r) {
    const auto common = slots.first(num_common);
    const auto own = slots.subspan(num_common + r * num_own, num_own);
    auto& row = rows.emplace_back(common.begin(), common.end());
    row.insert(row.end(), own.begin(), own.end());
    std::shuffle(row.begin(), row.end(), random);
  }
  return rows;
}
Rows RowsInCommon(int num_rows, int num_keys, double in_common) {
  std::vector<int32_t> slots(kNumSlots);
  std::iota(slots.begin(), slots.end(), 0);
  std::shuffle(slots.begin(), slots.end(), std::mt19937(7));
  return RowsInCommon(num_rows, num_keys, in_common, slots, 8);
}

// The sizes of the groups that a run of these rows is divided into; 1: attended alone. Checks every
// group's union.
std::vector<int32_t> GroupSizes(const Rows& rows, int64_t num_slots = kNumSlots) {
  Arena measure;
  UnionScratch::Carve(measure);
  const GuardedBuffer memory(measure.used());
  Arena arena(memory.workspace());
  const UnionScratch scratch = UnionScratch::Carve(arena);
  std::vector<AttentionItem> items;
  for (const auto& row : rows) {
    items.push_back({.slots = row.data(), .num_slots = static_cast<int64_t>(row.size())});
  }
  std::vector<int32_t> sizes;
  for (size_t first = 0; first < items.size();) {
    AttentionGroup group;
    const auto choice = ChooseGroup(std::span(items).subspan(first), num_slots, scratch, group);
    const auto count = static_cast<size_t>(choice.num_items);
    if (choice.together) {
      std::map<int32_t, unsigned> want;
      for (size_t i = 0; i < count; ++i) {
        for (const int32_t slot : rows[first + i]) {
          if (slot >= 0 && slot < num_slots) want[slot] |= 1u << i;
        }
      }
      std::map<int32_t, unsigned> got;
      for (int64_t k = 0; k < group.num_slots; ++k) {
        got[group.slots[k]] = group.masks[k] & ((1u << count) - 1);
      }
      EXPECT_EQ(got, want);
      EXPECT_EQ(group.num_slots, static_cast<int64_t>(want.size()));
      EXPECT_EQ(group.num_items, choice.num_items);
      for (size_t i = 0; i < count; ++i) EXPECT_EQ(group.items[i].slots, rows[first + i].data());
    }
    sizes.insert(sizes.end(), choice.together ? 1 : count, choice.together ? choice.num_items : 1);
    first += count;
  }
  EXPECT_TRUE(memory.GuardIntact());
  return sizes;
}

using Sizes = std::vector<int32_t>;

TEST(RowGroups, RowsGoTogetherByFourThenByTwoAsFarAsTheirUnionsAreSmall) {
  for (const int num_keys : {1, 5, 64, 2048, 4000}) {
    EXPECT_EQ(GroupSizes(RowsInCommon(4, num_keys, 1.0)), Sizes{4}) << num_keys;
    EXPECT_EQ(GroupSizes(RowsInCommon(3, num_keys, 1.0)), Sizes{3}) << num_keys;
    EXPECT_EQ(GroupSizes(RowsInCommon(2, num_keys, 1.0)), Sizes{2}) << num_keys;
    EXPECT_EQ(GroupSizes(RowsInCommon(1, num_keys, 1.0)), Sizes{1}) << num_keys;
    EXPECT_EQ(GroupSizes(RowsInCommon(4, num_keys, 0.0)), (Sizes{1, 1, 1, 1})) << num_keys;
  }
  EXPECT_EQ(GroupSizes(RowsInCommon(4, 2048, 0.75)), Sizes{4});            // 1.75 lists
  EXPECT_EQ(GroupSizes(RowsInCommon(4, 2048, 0.5)), (Sizes{2, 2}));        // 2.5, but 1.5 by two
  EXPECT_EQ(GroupSizes(RowsInCommon(3, 2048, 0.75)), Sizes{3});            // 1.5
  EXPECT_EQ(GroupSizes(RowsInCommon(3, 2048, 0.5)), (Sizes{2, 1}));        // 2
  EXPECT_EQ(GroupSizes(RowsInCommon(4, 2048, 0.4)), (Sizes{1, 1, 1, 1}));  // 1.6 by two
}

TEST(RowGroups, TwoPairsThatHaveNothingInCommonAreTwoGroups) {
  Rows rows = RowsInCommon(2, 700, 0.0);
  rows = {rows[0], rows[0], rows[1], rows[1]};
  EXPECT_EQ(GroupSizes(rows), Sizes{4});  // a union of two lists still pays
  rows[3].insert(rows[3].end(), {kNumSlots - 1, kNumSlots - 2});
  rows[2].insert(rows[2].end(), {kNumSlots - 3, kNumSlots - 4});
  EXPECT_EQ(GroupSizes(rows), (Sizes{2, 2}));
}

TEST(RowGroups, ListsOfVeryDifferentLengthsAreNoGroup) {
  const std::vector<int32_t> all = RowsInCommon(1, 8000, 1.0)[0];
  const auto first = [&](int count) {
    return std::vector<int32_t>(all.begin(), all.begin() + count);
  };
  EXPECT_EQ(GroupSizes({all, first(10), first(10), first(10)}), (Sizes{1, 1, 2}));
  EXPECT_EQ(GroupSizes({all, all, first(10), first(10)}), Sizes({4}));
  EXPECT_EQ(GroupSizes({first(10), all, first(10), first(10)}), (Sizes{1, 1, 2}));
}

// N3: a slot named twice counts twice, which a union cannot say.
TEST(RowGroups, ARowThatNamesASlotTwiceStaysAlone) {
  for (size_t row = 0; row < 4; ++row) {
    Rows rows = RowsInCommon(4, 100, 0.9);
    rows[row][99] = rows[row][3];
    EXPECT_EQ(GroupSizes(rows), row < 2 ? (Sizes{1, 1, 2}) : (Sizes{2, 1, 1}));
  }
}

TEST(RowGroups, InvalidSlotsAreNotInTheUnionAndARowOfThemStaysAlone) {
  Rows rows = RowsInCommon(4, 300, 0.9);
  for (auto& row : rows) {
    row.insert(row.begin() + 50, {-1, -1, 100000, -2147483647 - 1, 2147483647, 100000});
  }
  EXPECT_EQ(GroupSizes(rows), Sizes{4});
  rows[2].assign(300, -1);
  EXPECT_EQ(GroupSizes(rows), (Sizes{2, 1, 1}));
  EXPECT_EQ(GroupSizes(rows, 0), (Sizes{1, 1, 1, 1}));
}

TEST(RowGroups, AUnionThatExceedsTheScratchIsNoGroup) {
  EXPECT_EQ(GroupSizes(RowsInCommon(4, UnionScratch::kMaxSlots, 1.0)), Sizes{4});
  EXPECT_EQ(GroupSizes(RowsInCommon(2, UnionScratch::kMaxSlots + 1, 1.0)), (Sizes{1, 1}));
}

// The runs of a plan; every item is in one.
std::vector<std::pair<int32_t, int32_t>> RunsOf(const Plan& plan) {
  std::vector<std::pair<int32_t, int32_t>> runs;
  int32_t covered = 0;
  for (int32_t i = 0; i < static_cast<int32_t>(plan.schedule().work_items.size()); ++i) {
    const int32_t count = RunOfItems(plan, i);
    EXPECT_EQ(count == 0, i < covered) << "item " << i;
    if (count == 0) continue;
    runs.emplace_back(i, count);
    covered = i + count;
  }
  EXPECT_EQ(covered, static_cast<int32_t>(plan.schedule().work_items.size()));
  return runs;
}

TEST(RunOfItems, StartsAgainWithEveryRequestAndEveryFourRows) {
  plan_testing::Lengths lengths;
  for (const int32_t query_len : {3, 1, 9, 0, 2, 5}) lengths.Add(query_len, 100 + query_len);
  PlanCapacity capacity = plan_testing::MakeCapacity(4);
  capacity.force_splits = 1;
  Plan plan = plan_testing::CreatePlan(capacity);
  PlanParams params = plan_testing::MakeParams(lengths, capacity);
  params.num_tokens = 24;  // 20 and padding
  ASSERT_TRUE(plan.Build(params).ok());
  std::vector<std::pair<int32_t, int32_t>> want = {{0, 3},  {3, 1},  {4, 4},  {8, 4},
                                                   {12, 1}, {13, 2}, {15, 4}, {19, 1}};
  for (int32_t i = 20; i < static_cast<int32_t>(plan.schedule().work_items.size()); ++i) {
    want.emplace_back(i, 1);
  }
  EXPECT_EQ(RunsOf(plan), want);
}

TEST(RunOfItems, TakesNeighbouringWholeRowsWithKeysOfOneRequest) {
  plan_testing::Random random(3);
  int32_t num_together = 0;
  for (int step = 0; step < 200; ++step) {
    PlanCapacity capacity = plan_testing::MakeCapacity(random(1, 40), random.OneIn(2) ? 16 : 64);
    if (random.OneIn(3)) capacity.schedule = ScheduleKind::kAiter;
    const Plan plan = plan_testing::PlanOf(plan_testing::RandomLengths(random, 500, 30), capacity);
    const auto items = plan.schedule().work_items;
    const auto request_of = [&](const WorkItem& item) {
      return plan.req_id_per_token()[static_cast<size_t>(item.row_begin / plan.schedule().fold)];
    };
    for (const auto& [first, count] : RunsOf(plan)) {
      ASSERT_LE(count, AttentionGroup::kMaxItems);
      num_together += count > 1;
      for (int32_t k = 0; count > 1 && k < count; ++k) {
        const WorkItem& head = items[static_cast<size_t>(first)];
        const WorkItem& item = items[static_cast<size_t>(first + k)];
        ASSERT_EQ(item.partial_row, -1);
        ASSERT_LT(item.kv_begin, item.kv_end);
        ASSERT_EQ(item.row_begin, head.row_begin + k);
        ASSERT_EQ(request_of(item), request_of(head));
      }
    }
  }
  EXPECT_GT(num_together, 1000);
}

// ---- what they compute --------------------------------------------------------------------------

// Requests of several tokens whose rows have part of their slots in common.
struct SharedSpec {
  std::vector<int32_t> query_lens = {4, 3, 2, 1, 6};
  int num_keys = 150;
  double in_common = 0.75;
  int32_t num_heads = 8;
  int32_t kv_lora_rank = 32;
  int32_t qk_rope_head_dim = 8;
  SinkKind sinks = SinkKind::kNone;
};

AttentionCase SharedCase(const SharedSpec& shared, CacheFormat format) {
  const int num_rows = std::accumulate(shared.query_lens.begin(), shared.query_lens.end(), 0);
  AttentionSpec spec = ForFormat({.dims = {.num_heads = shared.num_heads,
                                           .kv_lora_rank = shared.kv_lora_rank,
                                           .qk_rope_head_dim = shared.qk_rope_head_dim},
                                  .num_slots = 8000,
                                  .sinks = shared.sinks},
                                 format);
  spec.row_lengths.assign(static_cast<size_t>(num_rows), shared.num_keys);
  spec.query_lens = shared.query_lens;
  AttentionCase attention(spec);
  attention.rows.clear();
  for (const int32_t query_len : shared.query_lens) {
    std::shuffle(attention.live_slots.begin(), attention.live_slots.end(), std::mt19937(5));
    for (auto& row :
         RowsInCommon(query_len, shared.num_keys, shared.in_common, attention.live_slots, 6)) {
      attention.rows.push_back(std::move(row));
    }
  }
  return attention;
}

constexpr RunOptions kWholeRows = {.force_splits = 1};

using RowGroupAnswers = KernelFormatTest;
INSTANTIATE_TEST_SUITE_P(All, RowGroupAnswers, EveryKernelAndFormat(), KernelFormatName);

// N8.
TEST_P(RowGroupAnswers, RowsOfOneRequestMatchTheReferenceWhateverTheyHaveInCommon) {
  for (const double in_common : {0.0, 0.5, 0.75, 1.0}) {
    for (const int32_t heads : {1, 7, 8, 16}) {
      const AttentionCase attention =
          SharedCase({.in_common = in_common, .num_heads = heads}, format());
      EXPECT_EQ(Mismatch(backend(), attention, kWholeRows), "")
          << in_common << " in common, " << heads << " heads";
      EXPECT_EQ(Mismatch(backend(), attention, {.num_compute_units = 3}), "")
          << in_common << " in common, " << heads << " heads, 3 units";
    }
  }
}

TEST_P(RowGroupAnswers, EveryNumberOfKeysMatchesTheReference) {
  for (const int num_keys : {1, 2, 16, 31, 33, 64, 300, 511, 700}) {
    const AttentionCase attention =
        SharedCase({.query_lens = {4, 3}, .num_keys = num_keys}, format());
    EXPECT_EQ(Mismatch(backend(), attention, kWholeRows), "") << num_keys << " keys";
  }
}

TEST_P(RowGroupAnswers, EveryWidthMatchesTheReference) {
  for (const auto& [latent, rope] : std::vector<std::pair<int32_t, int32_t>>{
           {512, 64}, {512, 0}, {128, 64}, {100, 28}, {33, 0}}) {
    const AttentionCase attention = SharedCase(
        {.query_lens = {4, 3, 2}, .kv_lora_rank = latent, .qk_rope_head_dim = rope}, format());
    EXPECT_EQ(Mismatch(backend(), attention, kWholeRows), "") << latent << " + " << rope;
  }
}

// Two pairs of equal rows: the second pair's keys all come after the first pair's.
TEST_P(RowGroupAnswers, RowsWhoseKeysComeLateInTheUnionMatchTheReference) {
  for (const int num_keys : {20, 40, 700}) {
    AttentionCase attention =
        SharedCase({.query_lens = {4}, .num_keys = num_keys, .in_common = 0.0}, format());
    attention.rows = {attention.rows[0], attention.rows[0], attention.rows[1], attention.rows[1]};
    ASSERT_EQ(GroupSizes(attention.rows), Sizes{4});
    const float scale = attention.softmax_scale;
    for (const float factor : {1.0f, 8.0f, -8.0f}) {
      attention.softmax_scale = scale * factor;
      EXPECT_EQ(Mismatch(backend(), attention, kWholeRows), "")
          << num_keys << " keys, scale times " << factor;
    }
  }
}

// The rows of a prompt's first tokens grow by one key each.
TEST_P(RowGroupAnswers, APromptFromItsFirstTokenOnMatchesTheReference) {
  AttentionCase attention =
      SharedCase({.query_lens = {70}, .num_keys = 70, .in_common = 1}, format());
  for (size_t r = 0; r < attention.rows.size(); ++r) {
    attention.rows[r].assign(attention.live_slots.begin(),
                             attention.live_slots.begin() + static_cast<int64_t>(r) + 1);
  }
  EXPECT_EQ(Mismatch(backend(), attention, kWholeRows), "");
}

// N3, N4, N5.
TEST_P(RowGroupAnswers, InvalidAndRepeatedSlotsEmptyRowsAndSinksMatchTheReference) {
  for (const SinkKind sinks : {SinkKind::kNone, SinkKind::kFinite, SinkKind::kMixed}) {
    AttentionCase attention = SharedCase(
        {.query_lens = {4, 4, 4, 4, 3}, .num_keys = 90, .in_common = 0.9, .sinks = sinks},
        format());
    auto& rows = attention.rows;
    for (size_t k = 0; k < 90; k += 3) rows[1][k] = k % 2 == 0 ? -1 : attention.spec.num_slots;
    rows[5][10] = rows[5][11];
    std::ranges::fill(rows[9], -1);
    std::ranges::fill(std::span(rows[12]).first(85), -1);
    std::ranges::fill(std::span(rows[15]).last(60), -1);
    rows[18][0] = rows[18][89];
    EXPECT_EQ(Mismatch(backend(), attention, kWholeRows), "");
    Outputs got = attention.MakeOutputs();
    RunOptions options = kWholeRows;
    options.write_empty_rows = false;
    ASSERT_TRUE(RunAttention(backend(), attention, options, got).ok());
    EXPECT_TRUE(got.RowUntouched(9));
    EXPECT_FALSE(got.RowUntouched(8));
  }
}

// N12: a weight of 0 would not keep it out of the other rows.
TEST_P(RowGroupAnswers, ANanInARowThatOneTokenSelectsIsSeenInThatTokenAlone) {
  for (const size_t row : {size_t{0}, size_t{1}, size_t{3}, size_t{5}}) {
    AttentionCase attention = SharedCase({.query_lens = {4, 2}, .in_common = 0.9}, format());
    std::vector<bool> live(static_cast<size_t>(attention.spec.num_slots));
    for (const int32_t slot : attention.live_slots) live[static_cast<size_t>(slot)] = true;
    const auto dead = std::ranges::find(live, false) - live.begin();
    attention.rows[row][149] = static_cast<int32_t>(dead);
    Outputs got = attention.MakeOutputs();
    ASSERT_TRUE(RunAttention(backend(), attention, kWholeRows, got).ok());
    for (int64_t r = 0; r < 6; ++r) {
      for (int64_t h = 0; h < attention.spec.dims.num_heads; ++h) {
        EXPECT_EQ(std::isnan(got.lse()(r, h)), r == static_cast<int64_t>(row));
      }
    }
    EXPECT_EQ(Mismatch(backend(), attention, kWholeRows), "");
  }
}

// A logit of -inf has weight 0 already, and 0 * inf is NaN in the value's column.
TEST_P(RowGroupAnswers, AnInfinityInARowThatOneTokenSelectsStaysInThatToken) {
  if (format() != CacheFormat::kBFloat16) return;
  AttentionCase attention = SharedCase({.query_lens = {4}, .in_common = 0.9}, format());
  const int32_t slot = attention.live_slots[1999];  // nobody's
  const uint16_t infinity = 0x7F80;
  std::memcpy(attention.Slot(slot) + 6, &infinity, sizeof(infinity));
  attention.rows[2][17] = slot;
  EXPECT_EQ(Mismatch(backend(), attention, kWholeRows), "");
}

// N7.
TEST_P(RowGroupAnswers, TheNumberOfThreadsDoesNotChangeABit) {
  const AttentionCase attention = SharedCase({.query_lens = {23, 3, 3, 2, 1, 9}}, format());
  Outputs want = attention.MakeOutputs();
  ASSERT_TRUE(RunAttention(*MakeBackend(kernel(), 1), attention, kWholeRows, want).ok());
  for (int32_t threads = 1; threads <= 8; ++threads) {
    const auto pool = MakeBackend(kernel(), threads);
    for (const std::byte scratch : {std::byte{0}, std::byte{0xFF}}) {
      RunOptions options = kWholeRows;
      options.scratch = scratch;
      Outputs got = attention.MakeOutputs();
      ASSERT_TRUE(RunAttention(*pool, attention, options, got).ok());
      EXPECT_TRUE(SameBits(got, want)) << threads << " threads";
    }
  }
}

// Whether a kernel's row of kernels.inc takes groups.
bool TakesGroups(const KernelUnderTest& tested) {
  for (const cpu::AttentionKernel& kernel : cpu::AttentionKernels()) {
    if (tested.backend == "cpu" && tested.kernel == kernel.name) return kernel.run_group != nullptr;
  }
  return false;
}

// N7: bits tell whether rows were attended together, as the sums then have another order.
TEST_P(RowGroupAnswers, RowsAreAttendedTogetherUnlessBitsMustNotDependOnNeighbours) {
  const auto bits_change = [&](int32_t heads, bool batch_invariant) {
    AttentionCase attention = SharedCase({.in_common = 0.9, .num_heads = heads}, format());
    const RunOptions options = {
        .num_compute_units = 1, .max_splits = 1, .batch_invariant = batch_invariant};
    Outputs together = attention.MakeOutputs();
    EXPECT_TRUE(RunAttention(backend(), attention, options, together).ok());
    attention.spec.query_lens = {};
    Outputs alone = attention.MakeOutputs();
    EXPECT_TRUE(RunAttention(backend(), attention, options, alone).ok());
    return !SameBits(together, alone);
  };
  EXPECT_EQ(bits_change(16, false), TakesGroups(kernel()));
  EXPECT_FALSE(bits_change(16, true));
  EXPECT_FALSE(bits_change(17, false));
}

}  // namespace
}  // namespace sparsemla::test
