// The seam to the machines: one abstract class at the granularity of a launch. Callers get one by
// name and hand it to the stages of attention.h, which check every argument first; the virtual
// methods trust theirs.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "sparsemla/plan.h"
#include "sparsemla/status.h"
#include "sparsemla/types.h"

#pragma GCC visibility push(default)
namespace sparsemla {

struct AttentionParams;
struct ConvertIndicesDenseParams;
struct ConvertIndicesParams;
struct FitKpoolIndicesParams;
struct MergeParams;

// What a caller wants to solve: the question of UnsupportedReason.
struct Problem {
  MlaDims dims = {};
  DType q_dtype = DType::kBFloat16;
  CacheFormat cache_format = CacheFormat::kBFloat16;
  DType out_dtype = DType::kBFloat16;
};

struct DeviceInfo {
  std::string name;               // "AMD EPYC, 2 threads"
  std::string features;           // instruction sets or architecture
  int32_t num_compute_units = 0;  // what PlanCapacity should say
  int32_t num_threads = 0;        // host threads that run work; 0 on devices
};

struct KernelInfo {
  std::string name;                // "attention_portable"
  std::string unavailable_reason;  // empty: this machine can run it
  bool selected = false;           // runs a problem of bf16 queries, cache and output
};

// Runs `task(argument, i)` once for every i in [0, count) on threads of an embedding engine and
// returns when all are done. May run fewer threads than num_threads at a time, never more; the
// calling thread may take part. A null `parallel_for` stands for the library's own pool. Should it
// throw, or run other indices than those, the stage returns kInternal (kResourceExhausted for
// bad_alloc) with what is known about it; the outputs are then undefined. A task that starts after
// parallel_for has returned cannot be noticed and is undefined behaviour.
struct Executor {
  void* context = nullptr;
  int32_t num_threads = 0;
  void (*parallel_for)(void* context, int32_t count, void (*task)(void* argument, int32_t index),
                       void* argument) = nullptr;
};

struct BackendOptions {
  // Attention kernel to force; empty: SPARSEMLA_CPU_KERNEL, then the best.
  std::string kernel = {};
  // cpu: threads of the own pool, at most 4096; 0: SPARSEMLA_NUM_THREADS, then all cores.
  int32_t num_threads = 0;
  // cpu: threads of the caller instead of the own pool.
  Executor executor = {};
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual std::string_view name() const = 0;  // "ref", "cpu"
  virtual DeviceInfo device() const = 0;
  virtual std::vector<KernelInfo> kernels() const = 0;  // best first
  // The attention kernel that runs this problem, which must be one that can be solved here.
  virtual std::string_view KernelName(const Problem& problem) const = 0;
  // Why this problem cannot be solved here; empty if it can.
  virtual std::string UnsupportedReason(const Problem& problem) const = 0;

  // Bytes of Workspace that Attention needs for any step within the capacity: the partials, laid
  // out as core/workspace.h says, then the back end's own scratch.
  virtual size_t AttentionWorkspaceBytes(const PlanCapacity& capacity) const = 0;

  // Stages. Asynchronous on `stream` where there are streams. They allocate nothing, synchronise
  // nothing and read no host scalar that changes between replays of a graph.
  virtual Status FitKpoolIndices(const FitKpoolIndicesParams& params, Stream stream) const = 0;
  virtual Status ConvertIndices(const ConvertIndicesParams& params, Stream stream) const = 0;
  virtual Status ConvertIndicesDense(const ConvertIndicesDenseParams& params,
                                     Stream stream) const = 0;
  virtual Status Attention(const AttentionParams& params, const Plan& plan, Workspace workspace,
                           Stream stream) const = 0;
  virtual Status Merge(const MergeParams& params, Stream stream) const = 0;
};

// Names of the back ends that this build contains, best first.
std::vector<std::string_view> BackendNames();

// Creates a back end: "cpu", "ref", or "" for SPARSEMLA_BACKEND, then the best that works here.
// kInvalidArgument: no such back end or kernel (the message lists them); kUnsupported: this machine
// cannot run it, with the reason. Thread-safe; the back end may be used from several threads at
// once as long as their outputs and workspaces differ.
Result<std::unique_ptr<Backend>> CreateBackend(std::string_view name,
                                               const BackendOptions& options = {});

// Library version, "0.1.0".
std::string_view Version();

}  // namespace sparsemla
#pragma GCC visibility pop
