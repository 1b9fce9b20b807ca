// The C ABI over the C++ interface: converts arguments, keeps the error text, lets no exception
// out. Every decision is made behind it.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "capi_structs.h"
#include "core/require.h"
#include "sparsemla/attention.h"
#include "sparsemla/backend.h"
#include "sparsemla/huge_pages.h"
#include "sparsemla/plan.h"
#include "sparsemla/sparsemla.h"

// The handles. Strings that the C side may hold live beside what they describe.
struct sparsemla_backend {
  std::unique_ptr<sparsemla::Backend> backend;
  std::string name;
  sparsemla::DeviceInfo device;
  std::vector<sparsemla::KernelInfo> kernels;
};
struct sparsemla_plan {
  sparsemla::Plan plan;
};

namespace sparsemla::capi {
namespace {

// Fixed size: an error can be told when there is no memory left.
thread_local std::array<char, 1024> last_error = {};

sparsemla_status Fail(StatusCode code, std::string_view message) {
  const size_t length = std::min(message.size(), last_error.size() - 1);
  std::memcpy(last_error.data(), message.data(), length);
  last_error[length] = '\0';
  return static_cast<sparsemla_status>(code);
}

// Runs the body of a call, keeps the text of its error, and lets nothing out.
template <typename Body>
sparsemla_status Guard(Body body) noexcept {
  try {
    const Status status = body();
    return status.ok() ? SPARSEMLA_OK : Fail(status.code(), status.message());
  } catch (const std::bad_alloc&) {
    return Fail(StatusCode::kResourceExhausted, "out of memory");
  } catch (const std::exception& error) {
    return Fail(StatusCode::kInternal, error.what());
  } catch (...) {
    return Fail(StatusCode::kInternal, "an exception of unknown type");
  }
}

#define SPARSEMLA_REQUIRE_NOT_NULL(argument) \
  SPARSEMLA_REQUIRE((argument) != nullptr, #argument, " is null")

Status CreateBackendHandle(const char* name, const sparsemla_backend_options* options,
                           sparsemla_backend** out) {
  SPARSEMLA_REQUIRE_NOT_NULL(name);
  sparsemla_backend_options in = SPARSEMLA_BACKEND_OPTIONS_INIT;
  if (options != nullptr) SPARSEMLA_RETURN_IF_ERROR(ReadStruct("options", options, in));
  BackendOptions cpp = {.kernel = in.kernel == nullptr ? "" : in.kernel};
  if (in.parallel_for == nullptr) {
    cpp.num_threads = in.num_threads;
  } else {
    cpp.executor = {.context = in.parallel_for_context,
                    .num_threads = in.num_threads,
                    .parallel_for = in.parallel_for};
  }
  auto backend = CreateBackend(name, cpp);
  if (!backend.ok()) return backend.status();
  auto handle = std::make_unique<sparsemla_backend>();
  handle->backend = std::move(backend).value();
  handle->name = handle->backend->name();
  handle->device = handle->backend->device();
  handle->kernels = handle->backend->kernels();
  *out = handle.release();
  return {};
}

}  // namespace
}  // namespace sparsemla::capi

using namespace sparsemla;        // NOLINT(google-build-using-namespace)
using namespace sparsemla::capi;  // NOLINT(google-build-using-namespace)

extern "C" {

int32_t sparsemla_version(void) {
  return SPARSEMLA_ABI_MAJOR * 1000 + SPARSEMLA_ABI_MINOR;
}

const char* sparsemla_library_version(void) {
  return Version().data();
}

const char* sparsemla_last_error(void) {
  return last_error.data();
}

sparsemla_status sparsemla_backend_create(const char* name,
                                          const sparsemla_backend_options* options,
                                          sparsemla_backend** backend) {
  return Guard([&]() -> Status {
    SPARSEMLA_REQUIRE_NOT_NULL(backend);
    return CreateBackendHandle(name, options, backend);
  });
}

void sparsemla_backend_destroy(sparsemla_backend* backend) {
  delete backend;
}

sparsemla_status sparsemla_backend_device(const sparsemla_backend* backend,
                                          sparsemla_device_info* info) {
  return Guard([&]() -> Status {
    SPARSEMLA_REQUIRE_NOT_NULL(backend);
    sparsemla_device_info out = {};
    out.num_compute_units = backend->device.num_compute_units;
    out.num_threads = backend->device.num_threads;
    out.backend = backend->name.c_str();
    out.name = backend->device.name.c_str();
    out.features = backend->device.features.c_str();
    return WriteStruct("info", out, info);
  });
}

int32_t sparsemla_backend_num_kernels(const sparsemla_backend* backend) {
  return backend == nullptr ? 0 : static_cast<int32_t>(backend->kernels.size());
}

sparsemla_status sparsemla_backend_kernel(const sparsemla_backend* backend, int32_t index,
                                          sparsemla_kernel_info* info) {
  return Guard([&]() -> Status {
    SPARSEMLA_REQUIRE_NOT_NULL(backend);
    const int32_t num_kernels = sparsemla_backend_num_kernels(backend);
    SPARSEMLA_REQUIRE(index >= 0 && index < num_kernels, "index is ", index, "; there are ",
                      num_kernels, " kernels");
    const KernelInfo& kernel = backend->kernels[static_cast<size_t>(index)];
    sparsemla_kernel_info out = {};
    out.selected = kernel.selected ? 1 : 0;
    out.name = kernel.name.c_str();
    out.unavailable_reason = kernel.unavailable_reason.c_str();
    return WriteStruct("info", out, info);
  });
}

sparsemla_status sparsemla_backend_unsupported_reason(const sparsemla_backend* backend,
                                                      const sparsemla_problem* problem,
                                                      const char** reason) {
  return Guard([&]() -> Status {
    SPARSEMLA_REQUIRE_NOT_NULL(backend);
    SPARSEMLA_REQUIRE_NOT_NULL(reason);
    sparsemla_problem in = SPARSEMLA_PROBLEM_INIT;
    SPARSEMLA_RETURN_IF_ERROR(ReadStruct("problem", problem, in));
    Problem cpp = {.dims = ToDims(in.dims)};
    SPARSEMLA_RETURN_IF_ERROR(ReadDType("q_dtype", in.q_dtype, cpp.q_dtype));
    SPARSEMLA_RETURN_IF_ERROR(ReadCacheFormat(in.cache_format, cpp.cache_format));
    SPARSEMLA_RETURN_IF_ERROR(ReadDType("out_dtype", in.out_dtype, cpp.out_dtype));
    thread_local std::string text;
    text = backend->backend->UnsupportedReason(cpp);
    *reason = text.c_str();
    return {};
  });
}

sparsemla_status sparsemla_plan_create(const sparsemla_plan_capacity* capacity,
                                       sparsemla_plan** plan) {
  return Guard([&]() -> Status {
    SPARSEMLA_REQUIRE_NOT_NULL(plan);
    PlanCapacity cpp;
    SPARSEMLA_RETURN_IF_ERROR(ReadCapacity(capacity, cpp));
    Result<Plan> created = Plan::Create(cpp);
    if (!created.ok()) return created.status();
    *plan = std::make_unique<sparsemla_plan>(sparsemla_plan{std::move(created).value()}).release();
    return {};
  });
}

void sparsemla_plan_destroy(sparsemla_plan* plan) {
  delete plan;
}

sparsemla_status sparsemla_workspace_bytes(const sparsemla_backend* backend,
                                           const sparsemla_plan_capacity* capacity,
                                           int32_t topk_width, size_t* bytes) {
  return Guard([&]() -> Status {
    SPARSEMLA_REQUIRE_NOT_NULL(backend);
    SPARSEMLA_REQUIRE_NOT_NULL(bytes);
    PlanCapacity cpp;
    SPARSEMLA_RETURN_IF_ERROR(ReadCapacity(capacity, cpp));
    const Result<size_t> needed = WorkspaceBytes(*backend->backend, cpp, topk_width);
    if (!needed.ok()) return needed.status();
    *bytes = needed.value();
    return {};
  });
}

sparsemla_status sparsemla_plan_build(sparsemla_plan* plan, const sparsemla_plan_params* params,
                                      int* changed) {
  return Guard([&]() -> Status {
    SPARSEMLA_REQUIRE_NOT_NULL(plan);
    PlanParams cpp;
    SPARSEMLA_RETURN_IF_ERROR(ReadPlanParams(params, cpp));
    const Result<bool> built = plan->plan.Build(cpp);
    if (!built.ok()) return built.status();
    if (changed != nullptr) *changed = built.value() ? 1 : 0;
    return {};
  });
}

sparsemla_status sparsemla_plan_get_info(const sparsemla_plan* plan, sparsemla_plan_info* info) {
  return Guard([&]() -> Status {
    SPARSEMLA_REQUIRE_NOT_NULL(plan);
    return WriteStruct("info", PlanInfo(plan->plan), info);
  });
}

sparsemla_status sparsemla_plan_get_schedule(const sparsemla_plan* plan,
                                             sparsemla_schedule* schedule) {
  return Guard([&]() -> Status {
    SPARSEMLA_REQUIRE_NOT_NULL(plan);
    return WriteStruct("schedule", ScheduleInfo(plan->plan), schedule);
  });
}

sparsemla_status sparsemla_get_aiter_buffer_sizes(const sparsemla_aiter_size_params* params,
                                                  sparsemla_aiter_buffer_sizes* sizes) {
  return Guard([&]() -> Status {
    sparsemla_aiter_size_params in = SPARSEMLA_AITER_SIZE_PARAMS_INIT;
    SPARSEMLA_RETURN_IF_ERROR(ReadStruct("params", params, in));
    AiterSizeParams cpp = {.num_compute_units = in.num_compute_units,
                           .max_num_tokens = in.max_num_tokens,
                           .num_heads = in.num_heads};
    SPARSEMLA_RETURN_IF_ERROR(ReadEnum("target", in.target, AiterTarget::kGfx950, cpp.target));
    SPARSEMLA_RETURN_IF_ERROR(ReadDType("q_dtype", in.q_dtype, cpp.q_dtype));
    SPARSEMLA_RETURN_IF_ERROR(ReadCacheFormat(in.cache_format, cpp.cache_format));
    const Result<AiterBufferSizes> result = GetAiterBufferSizes(cpp);
    if (!result.ok()) return result.status();
    const AiterBufferSizes& found = result.value();
    sparsemla_aiter_buffer_sizes out = {};
    out.work_meta_data = found.work_meta_data;
    out.work_indptr = found.work_indptr;
    out.work_info_set = found.work_info_set;
    out.reduce_indptr = found.reduce_indptr;
    out.reduce_final_map = found.reduce_final_map;
    out.reduce_partial_map = found.reduce_partial_map;
    return WriteStruct("sizes", out, sizes);
  });
}

sparsemla_status sparsemla_fit_kpool_indices(const sparsemla_backend* backend,
                                             const sparsemla_fit_kpool_indices_params* params,
                                             void* stream, sparsemla_tensor* result) {
  return Guard([&]() -> Status {
    SPARSEMLA_REQUIRE_NOT_NULL(backend);
    SPARSEMLA_REQUIRE_NOT_NULL(result);
    sparsemla_fit_kpool_indices_params in = SPARSEMLA_FIT_KPOOL_INDICES_PARAMS_INIT;
    SPARSEMLA_RETURN_IF_ERROR(ReadStruct("params", params, in));
    FitKpoolIndicesParams cpp = {.topk_tokens = in.topk_tokens};
    SPARSEMLA_RETURN_IF_ERROR(ReadTensor("topk_indices", in.topk_indices, cpp.topk_indices));
    SPARSEMLA_RETURN_IF_ERROR(ReadTensor("fitted", in.fitted, cpp.fitted));
    const auto fitted = FitKpoolIndices(*backend->backend, cpp, {stream});
    if (!fitted.ok()) return fitted.status();
    *result = WriteTensor(fitted.value());
    return {};
  });
}

sparsemla_status sparsemla_convert_indices(const sparsemla_backend* backend,
                                           const sparsemla_convert_indices_params* params,
                                           void* stream) {
  return Guard([&]() -> Status {
    SPARSEMLA_REQUIRE_NOT_NULL(backend);
    sparsemla_convert_indices_params in = SPARSEMLA_CONVERT_INDICES_PARAMS_INIT;
    SPARSEMLA_RETURN_IF_ERROR(ReadStruct("params", params, in));
    ConvertIndicesParams cpp = {.invalid_slot = in.invalid_slot};
    SPARSEMLA_RETURN_IF_ERROR(ReadTensor("topk_indices", in.topk_indices, cpp.topk_indices));
    SPARSEMLA_RETURN_IF_ERROR(ReadBlockTable(in, cpp.block_table));
    SPARSEMLA_RETURN_IF_ERROR(
        ReadArray("req_id_per_token", in.req_id_per_token, in.num_tokens, cpp.req_id_per_token));
    SPARSEMLA_RETURN_IF_ERROR(
        ReadArray("kv_indptr", in.kv_indptr, int64_t{in.num_tokens} + 1, cpp.kv_indptr));
    SPARSEMLA_RETURN_IF_ERROR(
        ReadArray("kv_indices", in.kv_indices, in.num_kv_indices, cpp.kv_indices));
    return ConvertIndices(*backend->backend, cpp, {stream});
  });
}

sparsemla_status sparsemla_convert_indices_dense(
    const sparsemla_backend* backend, const sparsemla_convert_indices_dense_params* params,
    void* stream) {
  return Guard([&]() -> Status {
    SPARSEMLA_REQUIRE_NOT_NULL(backend);
    sparsemla_convert_indices_dense_params in = SPARSEMLA_CONVERT_INDICES_DENSE_PARAMS_INIT;
    SPARSEMLA_RETURN_IF_ERROR(ReadStruct("params", params, in));
    ConvertIndicesDenseParams cpp = {.invalid_slot = in.invalid_slot};
    SPARSEMLA_RETURN_IF_ERROR(ReadTensor("topk_indices", in.topk_indices, cpp.topk_indices));
    SPARSEMLA_RETURN_IF_ERROR(ReadBlockTable(in, cpp.block_table));
    SPARSEMLA_RETURN_IF_ERROR(
        ReadArray("req_id_per_token", in.req_id_per_token, in.num_tokens, cpp.req_id_per_token));
    SPARSEMLA_RETURN_IF_ERROR(ReadTensor("slots", in.slots, cpp.slots));
    if (in.valid_counts != nullptr) {
      SPARSEMLA_RETURN_IF_ERROR(
          ReadArray("valid_counts", in.valid_counts, in.num_tokens, cpp.valid_counts));
    }
    return ConvertIndicesDense(*backend->backend, cpp, {stream});
  });
}

sparsemla_status sparsemla_attention(const sparsemla_backend* backend,
                                     const sparsemla_attention_params* params,
                                     const sparsemla_plan* plan, void* workspace,
                                     size_t workspace_bytes, void* stream) {
  return Guard([&]() -> Status {
    SPARSEMLA_REQUIRE_NOT_NULL(backend);
    SPARSEMLA_REQUIRE_NOT_NULL(plan);
    AttentionParams cpp;
    SPARSEMLA_RETURN_IF_ERROR(ReadAttention("params", params, plan->plan, cpp));
    return Attention(*backend->backend, cpp, plan->plan, {workspace, workspace_bytes}, {stream});
  });
}

sparsemla_status sparsemla_plan_partials(const sparsemla_plan* plan, void* workspace,
                                         size_t workspace_bytes, sparsemla_partials* partials) {
  return Guard([&]() -> Status {
    SPARSEMLA_REQUIRE_NOT_NULL(plan);
    SPARSEMLA_REQUIRE_NOT_NULL(workspace);
    SPARSEMLA_CHECK(plan->plan.built(), StatusCode::kFailedPrecondition,
                    "the plan is empty: Build has not succeeded yet");
    const Partials found = PlanPartials(plan->plan, {workspace, workspace_bytes});
    sparsemla_partials out = {};
    out.fold = found.fold;
    out.out = WriteTensor(found.out);
    out.lse = WriteTensor(found.lse);
    out.reduce_indptr = found.reduce_indptr.data();
    out.reduce_final_map =
        reinterpret_cast<const sparsemla_row_range*>(found.reduce_final_map.data());
    out.reduce_partial_map = found.reduce_partial_map.data();
    out.num_groups = static_cast<int64_t>(found.reduce_final_map.size());
    out.num_reduce_partials = static_cast<int64_t>(found.reduce_partial_map.size());
    return WriteStruct("partials", out, partials);
  });
}

sparsemla_status sparsemla_merge(const sparsemla_backend* backend,
                                 const sparsemla_merge_params* params, void* stream) {
  return Guard([&]() -> Status {
    SPARSEMLA_REQUIRE_NOT_NULL(backend);
    sparsemla_merge_params in = SPARSEMLA_MERGE_PARAMS_INIT;
    SPARSEMLA_RETURN_IF_ERROR(ReadStruct("params", params, in));
    MergeParams cpp;
    SPARSEMLA_RETURN_IF_ERROR(ReadPartials(in.partials, cpp.partials));
    SPARSEMLA_RETURN_IF_ERROR(ReadTensor("out", in.out, cpp.out));
    SPARSEMLA_RETURN_IF_ERROR(ReadTensor("lse", in.lse, cpp.lse));
    SPARSEMLA_RETURN_IF_ERROR(ReadSinks(in.sinks, cpp.out.shape[1], cpp.sinks));
    cpp.write_empty_rows = in.write_empty_rows != 0;
    return Merge(*backend->backend, cpp, {stream});
  });
}

sparsemla_status sparsemla_run(const sparsemla_backend* backend, const sparsemla_run_params* params,
                               const sparsemla_plan* plan, void* workspace, size_t workspace_bytes,
                               void* stream) {
  return Guard([&]() -> Status {
    SPARSEMLA_REQUIRE_NOT_NULL(backend);
    SPARSEMLA_REQUIRE_NOT_NULL(plan);
    sparsemla_run_params in = SPARSEMLA_RUN_PARAMS_INIT;
    SPARSEMLA_RETURN_IF_ERROR(ReadStruct("params", params, in));
    SparseMlaParams cpp;
    SPARSEMLA_RETURN_IF_ERROR(ReadTensor("topk_indices", in.topk_indices, cpp.topk_indices));
    SPARSEMLA_RETURN_IF_ERROR(ReadBlockTable(in, cpp.block_table));
    SPARSEMLA_RETURN_IF_ERROR(
        ReadAttention("params.attention", in.attention, plan->plan, cpp.attention));
    return SparseMla(*backend->backend, cpp, plan->plan, {workspace, workspace_bytes}, {stream});
  });
}

sparsemla_status sparsemla_huge_pages_allocate(size_t bytes, void** data) {
  return Guard([&]() -> Status {
    SPARSEMLA_REQUIRE_NOT_NULL(data);
    auto buffer = HugePageBuffer::Allocate(bytes);
    if (!buffer.ok()) return buffer.status();
    *data = buffer->Release();
    return {};
  });
}

void sparsemla_huge_pages_free(void* data, size_t bytes) {
  HugePageBuffer::Adopt(data, bytes);
}

sparsemla_status sparsemla_huge_pages_count(const void* data, size_t bytes, size_t* huge_bytes) {
  return Guard([&]() -> Status {
    SPARSEMLA_REQUIRE_NOT_NULL(huge_bytes);
    const auto count = CountHugePageBytes(data, bytes);
    if (!count.ok()) return count.status();
    *huge_bytes = count.value();
    return {};
  });
}

}  // extern "C"
