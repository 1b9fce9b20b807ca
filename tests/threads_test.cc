// Threads: the library's pool, executors of the caller, good and bad ones, and many callers at
// once. The tsan preset runs these tests.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <new>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cpu/parallel_for.h"
#include "cpu/thread_pool.h"
#include "sparsemla/sparsemla.h"
#include "tests/kernel_test.h"
#include "tests/matrix.h"

namespace sparsemla::test {
namespace {

using std::chrono::milliseconds;

// ---- the pool ----------------------------------------------------------------------------------

std::unique_ptr<cpu::ThreadPool> MakePool(int32_t num_threads) {
  auto pool = cpu::ThreadPool::Create(num_threads);
  EXPECT_TRUE(pool.ok()) << pool.status().message();
  return std::move(pool).value();
}

// Who is inside at a time, and who ever was.
class Attendance {
 public:
  void Enter() {
    std::lock_guard lock(mutex_);
    most_ = std::max(most_, ++inside_);
    threads_.insert(std::this_thread::get_id());
  }
  void Leave() {
    std::lock_guard lock(mutex_);
    --inside_;
  }
  int most() const { return most_; }
  size_t num_threads() const { return threads_.size(); }

 private:
  std::mutex mutex_;
  int inside_ = 0;
  int most_ = 0;
  std::set<std::thread::id> threads_;
};

TEST(ThreadPool, RunsEveryIndexOnceOnNoMoreThreadsThanItHas) {
  for (const int32_t num_threads : {1, 2, 3, 8}) {
    const auto pool = MakePool(num_threads);
    for (const int32_t count : {0, 1, 2, 1000}) {
      Attendance attendance;
      std::vector<std::atomic<int>> runs(static_cast<size_t>(count));
      const Status status = cpu::ParallelFor(pool->executor(), count, [&](int32_t i) {
        attendance.Enter();
        runs[static_cast<size_t>(i)] += 1;
        std::this_thread::sleep_for(std::chrono::microseconds(20));
        attendance.Leave();
      });
      EXPECT_TRUE(status.ok()) << status.message();
      EXPECT_TRUE(std::ranges::all_of(runs, [](int n) { return n == 1; })) << count;
      EXPECT_LE(attendance.most(), num_threads);
      EXPECT_LE(attendance.num_threads(), static_cast<size_t>(num_threads));
    }
  }
}

TEST(ThreadPool, LoopsInsideTasksRunEveryIndexOnceOnTheSameThreads) {
  const auto pool = MakePool(3);
  Attendance attendance;
  std::vector<std::atomic<int>> runs(8 * 8 * 8);
  const Executor executor = pool->executor();
  const Status status = cpu::ParallelFor(executor, 8, [&](int32_t a) {
    EXPECT_TRUE(cpu::ParallelFor(executor, 8, [&](int32_t b) {
                  EXPECT_TRUE(cpu::ParallelFor(executor, 8, [&](int32_t c) {
                                attendance.Enter();
                                runs[static_cast<size_t>((a * 8 + b) * 8 + c)] += 1;
                                attendance.Leave();
                              }).ok());
                }).ok());
  });
  EXPECT_TRUE(status.ok());
  EXPECT_TRUE(std::ranges::all_of(runs, [](int n) { return n == 1; }));
  EXPECT_LE(attendance.most(), 3);
  EXPECT_LE(attendance.num_threads(), 3u);
}

double CpuSeconds() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// An engine's own threads compute between two calls: the pool's must not be in their way.
TEST(ThreadPool, ThreadsWithoutWorkUseNoCpuTime) {
  const auto pool = MakePool(8);
  std::atomic<int> sum = 0;
  ASSERT_TRUE(cpu::ParallelFor(pool->executor(), 100, [&](int32_t i) { sum += i; }).ok());
  EXPECT_EQ(sum, 4950);
  std::this_thread::sleep_for(milliseconds(50));  // 1000 times as long as they look for work
  const double before = CpuSeconds();
  std::this_thread::sleep_for(milliseconds(400));
  EXPECT_LT(CpuSeconds() - before, 0.04);
}

// ---- executors of the caller -------------------------------------------------------------------

// An executor whose behaviour is a function of (count, task).
struct ScriptedExecutor {
  using Task = std::function<void(int32_t index)>;
  std::function<void(int32_t count, const Task& task)> run;

  Executor executor(int32_t num_threads = 4) {
    return {.context = this,
            .num_threads = num_threads,
            .parallel_for = [](void* context, int32_t count, void (*task)(void*, int32_t),
                               void* argument) {
              static_cast<ScriptedExecutor*>(context)->run(
                  count, [&](int32_t index) { task(argument, index); });
            }};
  }
};

void RunInOrder(int32_t count, const ScriptedExecutor::Task& task) {
  for (int32_t i = 0; i < count; ++i) task(i);
}

// Threads of its own for every loop, which take the indices backwards.
void RunOnNewThreads(int32_t count, const ScriptedExecutor::Task& task) {
  std::atomic<int32_t> left = count;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int32_t i = left.fetch_sub(1); i > 0; i = left.fetch_sub(1)) task(i - 1);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Inputs of every stage, large enough for several tasks each.
class StageCalls {
 public:
  StageCalls() {
    for (int32_t i = 0; i < kTokens; ++i) indptr_.push_back((i + 1) * kTopk);
  }

  // What each stage says, by name.
  std::vector<std::pair<std::string, Status>> Run(const Backend& backend) {
    std::vector<std::pair<std::string, Status>> answers;
    answers.emplace_back("FitKpoolIndices", FitKpoolIndices(backend, {.topk_indices = topk_.view(),
                                                                      .topk_tokens = kTopk / 2,
                                                                      .fitted = fitted_.view()})
                                                .status());
    const BlockTable table = {blocks_.view(), 16, 8, 0};
    answers.emplace_back("ConvertIndices", ConvertIndices(backend, {.topk_indices = topk_.view(),
                                                                    .block_table = table,
                                                                    .req_id_per_token = req_ids_,
                                                                    .kv_indptr = indptr_,
                                                                    .kv_indices = slots_}));
    answers.emplace_back("ConvertIndicesDense",
                         ConvertIndicesDense(backend, {.topk_indices = topk_.view(),
                                                       .block_table = table,
                                                       .req_id_per_token = req_ids_,
                                                       .slots = dense_.view()}));
    const auto plan = MakePlan(attention_, {.force_splits = 4});
    EXPECT_TRUE(plan.ok());
    const GuardedBuffer scratch(backend.AttentionWorkspaceBytes(plan.value().capacity()));
    const Outputs outputs = attention_.MakeOutputs();
    const AttentionParams params = attention_.Params(outputs);
    answers.emplace_back("Attention",
                         Attention(backend, params, plan.value(), scratch.workspace()));
    answers.emplace_back(
        "Merge", Merge(backend, {.partials = PlanPartials(plan.value(), scratch.workspace()),
                                 .out = params.out,
                                 .lse = params.lse}));
    return answers;
  }

 private:
  static constexpr int32_t kTokens = 100;
  static constexpr int32_t kTopk = 1024;
  const AttentionCase attention_{
      {.dims = {.num_heads = 16, .kv_lora_rank = 512, .qk_rope_head_dim = 64},
       .row_lengths = {200, 300}}};
  const Matrix topk_{Rows(kTokens, std::vector<int32_t>(kTopk, 3))};
  Matrix fitted_{kTokens, kTopk / 2};
  Matrix dense_{kTokens, kTopk};
  const Matrix blocks_{Rows{{1, 2}}};
  std::vector<int32_t> req_ids_ = std::vector<int32_t>(kTokens, 0);
  std::vector<int32_t> indptr_ = {0};
  std::vector<int32_t> slots_ = std::vector<int32_t>(kTokens * kTopk);
};

// Every stage answers with `code` and a message that begins with `message`, and the back end works
// once the executor does.
void ExpectEveryStageFails(
    const std::function<void(int32_t, const ScriptedExecutor::Task&)>& misbehaviour,
    StatusCode code, const std::string& message) {
  ScriptedExecutor scripted = {misbehaviour};
  const auto backend = CreateBackend("cpu", {.executor = scripted.executor()});
  ASSERT_TRUE(backend.ok()) << backend.status().message();
  StageCalls calls;
  for (const auto& [stage, status] : calls.Run(*backend.value())) {
    EXPECT_EQ(status.code(), code) << stage;
    EXPECT_TRUE(status.message().starts_with(message)) << stage << ": " << status.message();
  }
  scripted.run = RunInOrder;
  for (const auto& [stage, status] : calls.Run(*backend.value())) {
    EXPECT_TRUE(status.ok()) << stage << ": " << status.message();
  }
}

TEST(ExecutorErrors, AnExceptionBecomesAStatusWithItsText) {
  ExpectEveryStageFails([](int32_t, const auto&) { throw std::runtime_error("no threads today"); },
                        StatusCode::kInternal, "the executor threw: no threads today");
  ExpectEveryStageFails(
      [](int32_t, const auto& task) {
        task(0);
        throw std::runtime_error("lost a worker");
      },
      StatusCode::kInternal, "the executor threw: lost a worker");
  ExpectEveryStageFails([](int32_t, const auto&) { throw std::bad_alloc(); },
                        StatusCode::kResourceExhausted, "the executor ran out of memory");
  ExpectEveryStageFails([](int32_t, const auto&) { throw 7; },  // NOLINT
                        StatusCode::kInternal, "the executor threw something");
}

TEST(ExecutorErrors, IndicesThatAreLeftOutRepeatedOrMadeUpAreReported) {
  ExpectEveryStageFails([](int32_t, const auto&) {}, StatusCode::kInternal,
                        "the executor ran 0 tasks; it was asked for ");
  ExpectEveryStageFails([](int32_t count, const auto& task) { RunInOrder(count - 1, task); },
                        StatusCode::kInternal, "the executor ran ");
  ExpectEveryStageFails(
      [](int32_t count, const auto& task) {
        RunInOrder(count, task);
        RunInOrder(count, task);
      },
      StatusCode::kInternal, "the executor ran ");
  ExpectEveryStageFails(
      [](int32_t count, const auto& task) {
        for (int32_t i = 0; i < count; ++i) task(0);
      },
      StatusCode::kInternal, "the executor ran ");
  ExpectEveryStageFails(
      [](int32_t count, const auto& task) {
        for (int32_t i = 0; i < count; ++i) task(i + 1000000);
      },
      StatusCode::kInternal, "the executor ran ");
}

TEST(ExecutorErrors, AnExceptionOfAParallelForDoesNotLeaveTheCAbi) {
  sparsemla_backend_options options = SPARSEMLA_BACKEND_OPTIONS_INIT;
  options.num_threads = 2;
  options.parallel_for = [](void*, int32_t, sparsemla_task, void*) {
    throw std::runtime_error("stopped");
  };
  sparsemla_backend* backend = nullptr;
  ASSERT_EQ(sparsemla_backend_create("cpu", &options, &backend), SPARSEMLA_OK);
  std::vector<int32_t> topk(64 * 2048);
  std::vector<int32_t> fitted(64 * 1024);
  sparsemla_fit_kpool_indices_params params = SPARSEMLA_FIT_KPOOL_INDICES_PARAMS_INIT;
  params.topk_tokens = 1024;
  params.topk_indices = {topk.data(), SPARSEMLA_INT32, 2, {64, 2048}, {}};
  params.fitted = {fitted.data(), SPARSEMLA_INT32, 2, {64, 1024}, {}};
  sparsemla_tensor result = SPARSEMLA_NO_TENSOR;
  EXPECT_EQ(sparsemla_fit_kpool_indices(backend, &params, nullptr, &result), SPARSEMLA_INTERNAL);
  EXPECT_STREQ(sparsemla_last_error(), "the executor threw: stopped");
  sparsemla_backend_destroy(backend);
}

// The frame that the tasks read is gone once the loop has returned.
TEST(ExecutorErrors, ALoopThatThrowsIsLeftOnlyWhenNoTaskIsInsideAnyMore) {
  std::atomic<bool> inside = false;
  std::atomic<bool> done = false;
  std::thread helper;
  struct Direct {
    std::thread* helper;
    std::atomic<bool>* inside;
  } direct = {&helper, &inside};
  const Executor executor = {
      .context = &direct,
      .num_threads = 2,
      .parallel_for = [](void* context, int32_t, void (*task)(void*, int32_t), void* argument) {
        auto* const self = static_cast<Direct*>(context);
        *self->helper = std::thread([task, argument] { task(argument, 0); });
        while (!*self->inside) std::this_thread::yield();
        throw std::runtime_error("gave up");
      }};
  const Status status = cpu::ParallelFor(executor, 2, [&](int32_t) {
    inside = true;
    std::this_thread::sleep_for(milliseconds(50));
    done = true;
  });
  EXPECT_TRUE(done);
  EXPECT_EQ(status.message(), "the executor threw: gave up");
  helper.join();
}

TEST(ExecutorResults, AreTheBitsOfThePool) {
  const AttentionCase attention({.row_lengths = {300, 1, 0, 70}, .sinks = SinkKind::kFinite});
  const auto pool = CreateBackend("cpu", {.num_threads = 3});
  ASSERT_TRUE(pool.ok());
  Outputs want = attention.MakeOutputs();
  ASSERT_TRUE(RunAttention(*pool.value(), attention, {.force_splits = 4}, want).ok());
  for (const auto& run : {RunInOrder, RunOnNewThreads}) {
    ScriptedExecutor scripted = {run};
    const auto backend = CreateBackend("cpu", {.executor = scripted.executor()});
    ASSERT_TRUE(backend.ok());
    Outputs got = attention.MakeOutputs();
    ASSERT_TRUE(RunAttention(*backend.value(), attention, {.force_splits = 4}, got).ok());
    EXPECT_TRUE(SameBits(got, want));
  }
}

// ---- many callers ------------------------------------------------------------------------------

TEST(ThreadsOfCallers, AHundredShareABackEndAndGetTheirOwnAnswers) {
  const auto backend = CreateBackend("cpu", {.num_threads = 3});
  ASSERT_TRUE(backend.ok());
  constexpr uint32_t kKinds = 5;
  const RunOptions options = {.force_splits = 3};
  std::vector<AttentionCase> cases;
  std::vector<Outputs> want;
  const auto alone = CreateBackend("cpu", {.num_threads = 1});
  for (uint32_t kind = 0; kind < kKinds; ++kind) {
    cases.emplace_back(AttentionSpec{.row_lengths = {64, static_cast<int32_t>(kind), 130},
                                     .sinks = SinkKind::kFinite,
                                     .seed = kind + 1});
    want.push_back(cases.back().MakeOutputs());
    ASSERT_TRUE(RunAttention(*alone.value(), cases.back(), options, want.back()).ok());
  }
  std::atomic<int> num_right = 0;
  std::vector<std::thread> callers;
  for (uint32_t caller = 0; caller < 100; ++caller) {
    callers.emplace_back([&, kind = caller % kKinds] {
      const AttentionCase mine = cases[kind];
      for (int repeat = 0; repeat < 3; ++repeat) {
        Outputs got = mine.MakeOutputs();
        const Status status = RunAttention(*backend.value(), mine, options, got);
        num_right += status.ok() && SameBits(got, want[kind]) ? 1 : 0;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(num_right, 300);
}

}  // namespace
}  // namespace sparsemla::test
