#include "cpu/cpu_backend.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <fstream>
#include <new>
#include <string>
#include <thread>
#include <utility>

#include "core/problem.h"
#include "core/require.h"
#include "core/validate.h"
#include "core/workspace.h"
#include "cpu/kernels.h"
#include "cpu/parallel_for.h"
#include "cpu/row_groups.h"
#include "cpu/stage_kernels.h"
#include "cpu/stages.h"
#include "cpu/thread_pool.h"
#include "plan/schedule.h"

namespace sparsemla {
namespace {

using cpu::AttentionCall;
using cpu::AttentionGroup;
using cpu::AttentionItem;
using cpu::AttentionKernel;

int32_t HardwareThreads() {
  return std::max(1, static_cast<int32_t>(std::thread::hardware_concurrency()));
}

std::string CpuName() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "CPU";
}

// The memory of one thread.
struct ThreadScratch {
  struct Needs {
    int64_t kernel_bytes = 0;
    bool groups = false;
  };
  std::byte* kernel = nullptr;  // [kernel_bytes]
  cpu::UnionScratch slots;      // of a group; where there are groups

  static ThreadScratch Carve(Arena& arena, const Needs& needs) {
    ThreadScratch scratch;
    scratch.kernel = arena.Take<std::byte>(needs.kernel_bytes);
    if (needs.groups) scratch.slots = cpu::UnionScratch::Carve(arena);
    return scratch;
  }
};

// The workspace of a call: the partials, then the scratch of every thread.
struct CallMemory {
  PartialBuffers partials;
  std::byte* scratch = nullptr;  // [num_threads, scratch_bytes]
  int64_t scratch_bytes = 0;
  ThreadScratch::Needs needs;

  static CallMemory Carve(Arena& arena, const PlanCapacity& capacity,
                          const ThreadScratch::Needs& needs, int32_t num_threads) {
    CallMemory memory;
    memory.partials = PartialBuffers::Carve(arena, plan::MaxPartialHeads(capacity), 1,
                                            capacity.dims.kv_lora_rank);
    Arena measure;
    ThreadScratch::Carve(measure, needs);
    memory.needs = needs;
    memory.scratch_bytes = static_cast<int64_t>(measure.used());
    memory.scratch = arena.Take<std::byte>(num_threads * memory.scratch_bytes);
    return memory;
  }
  ThreadScratch OfThread(int32_t thread) const {
    Arena arena(Workspace{scratch + thread * scratch_bytes, 0});
    return ThreadScratch::Carve(arena, needs);
  }
};

cpu::QueryPart ResolveQueryPart(const ConstTensor<3>& tensor, int64_t column) {
  const auto bytes = static_cast<int64_t>(DTypeBytes(tensor.dtype));
  return {.data = static_cast<const std::byte*>(tensor.data) + column * bytes,
          .row_stride_bytes = tensor.strides[0] * bytes,
          .head_stride_bytes = tensor.strides[1] * bytes,
          .dtype = tensor.dtype};
}

AttentionCall ResolveCall(const AttentionParams& params, const MlaDims& dims) {
  const KvCache& cache = params.kv_cache;
  const Query& query = params.query;
  const bool whole = IsWhole(query);
  AttentionCall call;
  call.dims = dims;
  call.latent = ResolveQueryPart(whole ? query.q : query.ql_nope, 0);
  if (dims.qk_rope_head_dim > 0) {
    call.rope = whole ? ResolveQueryPart(query.q, dims.kv_lora_rank)  //
                      : ResolveQueryPart(query.q_pe, 0);
  }
  call.cache = static_cast<const std::byte*>(cache.data);
  call.cache_format = cache.format;
  call.num_slots = cache.num_slots;
  call.cache_row_bytes = CacheRowBytes(cache.format, dims);
  call.cache_row_stride_bytes =
      cache.row_stride_bytes == 0 ? call.cache_row_bytes : cache.row_stride_bytes;
  constexpr double kLog2E = 1.44269504088896340736;
  double scale = double{params.softmax_scale} * kLog2E;
  if (IsPerTensorFp8(cache.format)) {
    scale *= double{params.q_scale} * params.kv_scale;
    call.value_scale = params.kv_scale;
    if (DTypeBytes(call.latent.dtype) > 1) call.quantise_scale = 1.0f / params.q_scale;
  }
  call.scale_log2 = static_cast<float>(scale);
  call.sinks = params.sinks.empty() ? nullptr : params.sinks.data();
  call.out = params.out.data;
  call.out_dtype = params.out.dtype;
  call.lse = params.lse.data;
  for (size_t d = 0; d < 2; ++d) {
    call.out_strides[d] = params.out.strides[d];
    call.lse_strides[d] = params.lse.strides[d];
  }
  call.write_empty_rows = params.write_empty_rows;
  return call;
}

AttentionItem ResolveItem(const WorkItem& work, const Schedule& schedule, const int32_t* kv_indices,
                          const PartialBuffers& partials, int64_t kv_lora_rank) {
  AttentionItem item;
  item.row = work.row_begin / schedule.fold;
  item.head_begin = work.row_begin % schedule.fold * schedule.heads_per_item;
  item.num_heads = schedule.heads_per_item;
  item.slots = kv_indices + work.kv_begin;
  item.num_slots = work.kv_end - work.kv_begin;
  if (work.partial_row >= 0) {
    const int64_t first_head = int64_t{work.partial_row} * schedule.heads_per_item;
    item.partial_out = partials.out + first_head * kv_lora_rank;
    item.partial_lse = partials.lse + first_head;
  }
  return item;
}

// Whether the kernel may attend items in groups: the bits of a row then depend on its neighbours.
bool TakesGroups(const AttentionKernel& kernel, const PlanCapacity& capacity) {
  return kernel.run_group != nullptr && !capacity.batch_invariant;
}

// Computes a run of items (RunOfItems), in groups where they pay.
void RunItems(const AttentionKernel& kernel, const AttentionCall& call,
              std::span<const AttentionItem> items, const ThreadScratch& scratch) {
  while (!items.empty()) {
    AttentionGroup group;
    const auto choice = cpu::ChooseGroup(items, call.num_slots, scratch.slots, group);
    const auto count = static_cast<size_t>(choice.num_items);
    if (!choice.together || !kernel.run_group(call, group, scratch.kernel)) {
      for (const AttentionItem& item : items.first(count)) kernel.run(call, item, scratch.kernel);
    }
    items = items.subspan(count);
  }
}

class CpuBackend final : public Backend {
 public:
  CpuBackend(const AttentionKernel* forced_kernel, Executor executor,
             std::unique_ptr<cpu::ThreadPool> pool)
      : forced_kernel_(forced_kernel),
        stage_kernels_(cpu::SelectStageKernels(forced_kernel ? forced_kernel->arch : arch_)),
        executor_(executor),
        pool_(std::move(pool)) {}

  std::string_view name() const override { return "cpu"; }
  DeviceInfo device() const override;
  std::vector<KernelInfo> kernels() const override;
  std::string_view KernelName(const Problem& problem) const override {
    return KernelOf(problem).name;
  }
  std::string UnsupportedReason(const Problem& problem) const override {
    const std::string reason = sparsemla::UnsupportedReason(problem);
    if (!reason.empty() || forced_kernel_ == nullptr) return reason;
    return forced_kernel_->unsupported_reason(problem);
  }
  size_t AttentionWorkspaceBytes(const PlanCapacity& capacity) const override;

  Status FitKpoolIndices(const FitKpoolIndicesParams& params, Stream) const override {
    return cpu::FitKpoolIndices(params, stage_kernels_, executor_);
  }
  Status ConvertIndices(const ConvertIndicesParams& params, Stream) const override {
    return cpu::ConvertIndices(params, stage_kernels_, executor_);
  }
  Status ConvertIndicesDense(const ConvertIndicesDenseParams& params, Stream) const override {
    return cpu::ConvertIndicesDense(params, stage_kernels_, executor_);
  }
  Status Attention(const AttentionParams& params, const Plan& plan, Workspace workspace,
                   Stream stream) const override;
  Status Merge(const MergeParams& params, Stream) const override {
    return cpu::Merge(params, stage_kernels_, executor_);
  }

 private:
  const AttentionKernel& KernelOf(const Problem& problem) const {
    return forced_kernel_ != nullptr ? *forced_kernel_ : cpu::BestKernel(problem, arch_);
  }
  ThreadScratch::Needs NeedsOf(const PlanCapacity& capacity) const;

  const cpu::ArchFlags arch_ = cpu::DetectArch();
  const AttentionKernel* forced_kernel_;    // or null
  const cpu::StageKernels& stage_kernels_;  // of a forced kernel's instruction sets, or the best
  Executor executor_;
  std::unique_ptr<cpu::ThreadPool> pool_;  // null where the caller brought an executor
};

DeviceInfo CpuBackend::device() const {
  const char* const threads = executor_.num_threads == 1 ? " thread" : " threads";
  return {.name = StrCat(CpuName(), ", ", executor_.num_threads, threads),
          .features = cpu::ArchNames(arch_),
          .num_compute_units = HardwareThreads(),
          .num_threads = executor_.num_threads};
}

std::vector<KernelInfo> CpuBackend::kernels() const {
  const AttentionKernel& selected = KernelOf(Problem{});
  std::vector<KernelInfo> infos;
  for (const AttentionKernel& kernel : cpu::AttentionKernels()) {
    infos.push_back({.name = std::string(kernel.name),
                     .unavailable_reason = cpu::UnavailableReason(kernel, arch_),
                     .selected = &kernel == &selected});
  }
  return infos;
}

// Which kernel runs depends on the problem; a workspace serves all of them.
ThreadScratch::Needs CpuBackend::NeedsOf(const PlanCapacity& capacity) const {
  ThreadScratch::Needs needs;
  for (const AttentionKernel& kernel : cpu::AttentionKernels()) {
    if (forced_kernel_ != nullptr ? &kernel != forced_kernel_ : (kernel.arch & ~arch_) != 0) {
      continue;
    }
    needs.kernel_bytes = std::max(needs.kernel_bytes, kernel.scratch_bytes(capacity.dims));
    needs.groups = needs.groups || TakesGroups(kernel, capacity);
  }
  return needs;
}

size_t CpuBackend::AttentionWorkspaceBytes(const PlanCapacity& capacity) const {
  Arena measure;
  CallMemory::Carve(measure, capacity, NeedsOf(capacity), executor_.num_threads);
  return measure.used();
}

// One task a thread: it owns a scratch and takes items, or runs of them, until none is left. Which
// thread computes an item does not matter to its result.
Status CpuBackend::Attention(const AttentionParams& params, const Plan& plan, Workspace workspace,
                             Stream) const {
  const Schedule& schedule = plan.schedule();
  MlaDims item_dims = plan.dims();
  item_dims.num_heads = schedule.heads_per_item;
  Arena arena(workspace);
  const CallMemory memory =
      CallMemory::Carve(arena, plan.capacity(), NeedsOf(plan.capacity()), executor_.num_threads);
  // Where Merge looks for this plan's partials (PlanPartials); at most what was carved.
  Arena partials_arena(workspace);
  const auto partials = PartialBuffers::Carve(partials_arena, schedule.num_partials,
                                              schedule.heads_per_item, item_dims.kv_lora_rank);
  const AttentionCall call = ResolveCall(params, item_dims);
  const AttentionKernel& kernel = KernelOf({.dims = plan.dims(),
                                            .q_dtype = plan.q_dtype(),
                                            .cache_format = plan.cache_format(),
                                            .out_dtype = params.out.dtype});

  const bool in_groups =
      TakesGroups(kernel, plan.capacity()) && schedule.heads_per_item <= AttentionGroup::kMaxHeads;
  const auto num_items = static_cast<int32_t>(schedule.work_items.size());
  std::atomic<int32_t> next_item = 0;
  auto take_items = [&](int32_t task) {
    const ThreadScratch scratch = memory.OfThread(task);
    for (int32_t i = next_item.fetch_add(1); i < num_items; i = next_item.fetch_add(1)) {
      // An item inside a run is computed with the first one.
      const auto count = static_cast<size_t>(in_groups ? cpu::RunOfItems(plan, i) : 1);
      AttentionItem items[AttentionGroup::kMaxItems];
      for (size_t k = 0; k < count; ++k) {
        items[k] = ResolveItem(schedule.work_items[static_cast<size_t>(i) + k], schedule,
                               params.kv_indices.data(), partials, item_dims.kv_lora_rank);
      }
      RunItems(kernel, call, {items, count}, scratch);
    }
  };
  return cpu::ParallelFor(executor_, std::min(executor_.num_threads, num_items), take_items);
}

}  // namespace

Result<std::unique_ptr<Backend>> MakeCpuBackend(const BackendOptions& options) {
  const AttentionKernel* forced_kernel = nullptr;
  if (!options.kernel.empty()) {
    const auto found = cpu::FindKernel(options.kernel, cpu::DetectArch());
    if (!found.ok()) return found.status();
    forced_kernel = found.value();
  }
  Executor executor = options.executor;
  std::unique_ptr<cpu::ThreadPool> pool;
  if (executor.parallel_for != nullptr) {
    SPARSEMLA_REQUIRE(executor.num_threads >= 1, "executor.num_threads is ", executor.num_threads,
                      "; it must be at least 1");
  } else {
    auto created =
        cpu::ThreadPool::Create(options.num_threads > 0 ? options.num_threads : HardwareThreads());
    if (!created.ok()) return created.status();
    pool = std::move(created).value();
    executor = pool->executor();
  }
  return std::unique_ptr<Backend>(new CpuBackend(forced_kernel, executor, std::move(pool)));
}

}  // namespace sparsemla
