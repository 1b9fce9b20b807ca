/* The C ABI from plain C: whole calls and single stages against answers found by hand, every kind
 * of error, and the rules of struct_size. Built in the tree and again against an installed copy. */
#define _POSIX_C_SOURCE 200112L /* posix_memalign, pthread */
#include <math.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sparsemla/sparsemla.h"

static int num_failures = 0;

#define CHECK(condition)                                            \
  do {                                                              \
    if (!(condition)) {                                             \
      ++num_failures;                                               \
      printf("%s:%d: false: %s\n", __FILE__, __LINE__, #condition); \
    }                                                               \
  } while (0)

#define CHECK_OK(call)                                                              \
  do {                                                                              \
    if ((call) != SPARSEMLA_OK) {                                                   \
      ++num_failures;                                                               \
      printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, sparsemla_last_error()); \
    }                                                                               \
  } while (0)

/* The call fails with `code` and its text contains `part`. */
#define CHECK_ERROR(call, code, part)                                                       \
  do {                                                                                      \
    const sparsemla_status status_ = (call);                                                \
    if (status_ != (code) || strstr(sparsemla_last_error(), (part)) == NULL) {              \
      ++num_failures;                                                                       \
      printf("%s:%d: %s: status %d, '%s' lacks '%s'\n", __FILE__, __LINE__, #call, status_, \
             sparsemla_last_error(), (part));                                               \
    }                                                                                       \
  } while (0)

static void CheckNear(int line, float got, float want) {
  const int same = isinf(want) ? got == want : fabsf(got - want) <= 1e-5f * (1.0f + fabsf(want));
  if (!same) {
    ++num_failures;
    printf("%s:%d: got %g, want %g\n", __FILE__, line, (double)got, (double)want);
  }
}
#define CHECK_NEAR(got, want) CheckNear(__LINE__, (got), (want))

/* Three decoding requests, all float32: request 0 sees one key, request 1 two keys with the same
 * logit, request 2 none. Block 0 of the cache belongs to nobody and holds NaN. */
enum { kTokens = 3, kHeads = 2, kRank = 32, kRope = 16, kWidth = kRank + kRope };
enum { kBlockSize = 4, kBlocks = 3, kSlots = kBlocks * kBlockSize, kTopk = 2 };

static const int32_t kQueryStartLoc[kTokens + 1] = {0, 1, 2, 3};
static const int32_t kSeqLens[kTokens] = {1, 2, 0};
static int32_t topk_indices[kTokens][kTopk] = {{0, -1}, {1, 0}, {-1, -1}};
static int32_t block_table[kTokens][1] = {{1}, {2}, {-1}};
static float q[kTokens][kHeads][kWidth];
static float kv_cache[kSlots][kWidth];
static float out[kTokens][kHeads][kRank];
static float lse[kTokens][kHeads];

static const float kLog2 = 0.69314718f;

/* Logit of head h over every key: softmax_scale * q.k = 0.5 * (h + 1) * 2. */
static float Logit(int head) {
  return (float)(head + 1);
}
/* Value of a slot: column 0 carries the logit, the others tell slot and column. */
static float Value(int slot, int column) {
  return column == 0 ? 2.0f : (float)(10 * slot + column);
}

static void FillInputs(void) {
  for (int slot = 0; slot < kSlots; ++slot) {
    for (int c = 0; c < kWidth; ++c) kv_cache[slot][c] = slot < kBlockSize ? NAN : Value(slot, c);
  }
  memset(q, 0, sizeof(q));
  for (int t = 0; t < kTokens; ++t) {
    for (int h = 0; h < kHeads; ++h) q[t][h][0] = (float)(h + 1);
  }
}

static void PoisonOutputs(void) {
  float* values = &out[0][0][0];
  for (size_t i = 0; i < sizeof(out) / sizeof(float); ++i) values[i] = NAN;
  for (int i = 0; i < kTokens * kHeads; ++i) lse[i / kHeads][i % kHeads] = NAN;
}

static sparsemla_tensor Tensor2(void* data, sparsemla_dtype dtype, int64_t d0, int64_t d1) {
  sparsemla_tensor tensor = {NULL, 0, 2, {0, 0, 0}, {0, 0, 0}};
  tensor.data = data;
  tensor.dtype = dtype;
  tensor.shape[0] = d0;
  tensor.shape[1] = d1;
  return tensor;
}

static sparsemla_tensor Tensor3(void* data, int64_t d0, int64_t d1, int64_t d2) {
  sparsemla_tensor tensor = Tensor2(data, SPARSEMLA_FLOAT32, d0, d1);
  tensor.ndim = 3;
  tensor.shape[2] = d2;
  return tensor;
}

static const sparsemla_dims kDims = {kHeads, kRank, kRope};

static sparsemla_plan_capacity Capacity(const sparsemla_backend* backend) {
  sparsemla_device_info device;
  sparsemla_plan_capacity capacity = SPARSEMLA_PLAN_CAPACITY_INIT;
  device.struct_size = sizeof(device);
  CHECK_OK(sparsemla_backend_device(backend, &device));
  capacity.num_compute_units = device.num_compute_units;
  capacity.max_num_tokens = 8;
  capacity.max_num_reqs = 8;
  capacity.topk_tokens = kTopk;
  capacity.dims = kDims;
  return capacity;
}

static sparsemla_plan_params PlanParams(void) {
  sparsemla_plan_params params = SPARSEMLA_PLAN_PARAMS_INIT;
  params.num_reqs = kTokens;
  params.query_start_loc = kQueryStartLoc;
  params.seq_lens = kSeqLens;
  params.dims = kDims;
  params.q_dtype = SPARSEMLA_FLOAT32;
  params.cache_format = SPARSEMLA_CACHE_FLOAT32;
  params.topk_tokens = kTopk;
  return params;
}

static sparsemla_attention_params AttentionParams(void) {
  sparsemla_attention_params params = SPARSEMLA_ATTENTION_PARAMS_INIT;
  params.cache_format = SPARSEMLA_CACHE_FLOAT32;
  params.softmax_scale = 0.5f;
  params.q = Tensor3(q, kTokens, kHeads, kWidth);
  params.kv_cache = kv_cache;
  params.num_slots = kSlots;
  params.out = Tensor3(out, kTokens, kHeads, kRank);
  params.lse = Tensor2(lse, SPARSEMLA_FLOAT32, kTokens, kHeads);
  return params;
}

static sparsemla_run_params RunParams(const sparsemla_attention_params* attention) {
  sparsemla_run_params params = SPARSEMLA_RUN_PARAMS_INIT;
  params.topk_indices = Tensor2(topk_indices, SPARSEMLA_INT32, kTokens, kTopk);
  params.block_table = Tensor2(block_table, SPARSEMLA_INT32, kTokens, 1);
  params.block_size = kBlockSize;
  params.num_blocks = kBlocks;
  params.attention = attention;
  return params;
}

/* What a test works with: one back end, a built plan, scratch memory. */
typedef struct Engine {
  sparsemla_backend* backend;
  sparsemla_plan* plan;
  void* workspace;
  size_t workspace_bytes;
} Engine;

static Engine MakeEngine(const char* name, const sparsemla_backend_options* options) {
  Engine engine = {NULL, NULL, NULL, 0};
  sparsemla_plan_capacity capacity;
  sparsemla_plan_params params = PlanParams();
  CHECK_OK(sparsemla_backend_create(name, options, &engine.backend));
  capacity = Capacity(engine.backend);
  CHECK_OK(sparsemla_plan_create(&capacity, &engine.plan));
  CHECK_OK(sparsemla_plan_build(engine.plan, &params, NULL));
  CHECK_OK(sparsemla_workspace_bytes(engine.backend, &capacity, 0, &engine.workspace_bytes));
  CHECK(posix_memalign(&engine.workspace, 64, engine.workspace_bytes) == 0);
  memset(engine.workspace, 0xFF, engine.workspace_bytes);
  return engine;
}

static void DestroyEngine(Engine* engine) {
  free(engine->workspace);
  sparsemla_plan_destroy(engine->plan);
  sparsemla_backend_destroy(engine->backend);
}

static void CheckAnswers(void) {
  for (int h = 0; h < kHeads; ++h) {
    CHECK_NEAR(lse[0][h], Logit(h));
    CHECK_NEAR(lse[1][h], Logit(h) + kLog2);
    CHECK_NEAR(lse[2][h], -INFINITY); /* N4 */
    for (int c = 0; c < kRank; ++c) {
      CHECK_NEAR(out[0][h][c], Value(4, c));
      CHECK_NEAR(out[1][h][c], (Value(8, c) + Value(9, c)) / 2.0f);
      CHECK_NEAR(out[2][h][c], 0.0f);
    }
  }
}

static void WholeCallGivesTheAnswersFoundByHand(const Engine* engine) {
  const sparsemla_attention_params attention = AttentionParams();
  const sparsemla_run_params params = RunParams(&attention);
  PoisonOutputs();
  CHECK_OK(sparsemla_run(engine->backend, &params, engine->plan, engine->workspace,
                         engine->workspace_bytes, NULL));
  CheckAnswers();
}

/* N5: a sink as heavy as the one key halves the output; -inf is no sink. N4: an empty row returns
 * the sink. */
static void SinksJoinTheSoftmaxWithoutAValue(const Engine* engine) {
  const float sinks[kHeads] = {1.0f, -INFINITY};
  sparsemla_attention_params attention = AttentionParams();
  const sparsemla_run_params params = RunParams(&attention);
  attention.sinks = sinks;
  PoisonOutputs();
  CHECK_OK(sparsemla_run(engine->backend, &params, engine->plan, engine->workspace,
                         engine->workspace_bytes, NULL));
  CHECK_NEAR(lse[0][0], Logit(0) + kLog2);
  CHECK_NEAR(lse[0][1], Logit(1));
  CHECK_NEAR(lse[2][0], 1.0f);
  CHECK_NEAR(lse[2][1], -INFINITY);
  for (int c = 0; c < kRank; ++c) {
    CHECK_NEAR(out[0][0][c], Value(4, c) / 2.0f);
    CHECK_NEAR(out[0][1][c], Value(4, c));
    CHECK_NEAR(out[2][0][c], 0.0f);
  }
}

static void StagesOneByOneGiveTheSameAnswers(const Engine* engine) {
  static const int32_t kWantSlots[3] = {4, 9, 8};
  int32_t kv_indices[4] = {77, 77, 77, 77};
  sparsemla_attention_params attention = AttentionParams();
  const sparsemla_run_params run = RunParams(&attention);
  sparsemla_convert_indices_params convert = SPARSEMLA_CONVERT_INDICES_PARAMS_INIT;
  sparsemla_merge_params merge = SPARSEMLA_MERGE_PARAMS_INIT;
  sparsemla_partials partials = SPARSEMLA_PARTIALS_INIT;
  sparsemla_plan_info info;
  info.struct_size = sizeof(info);
  CHECK_OK(sparsemla_plan_get_info(engine->plan, &info));
  convert.num_tokens = info.num_tokens;
  convert.block_size = run.block_size;
  convert.topk_indices = run.topk_indices;
  convert.block_table = run.block_table;
  convert.num_blocks = run.num_blocks;
  convert.req_id_per_token = info.req_id_per_token;
  convert.kv_indptr = info.kv_indptr;
  convert.kv_indices = kv_indices;
  convert.num_kv_indices = 4;
  CHECK_OK(sparsemla_convert_indices(engine->backend, &convert, NULL));
  CHECK(memcmp(kv_indices, kWantSlots, sizeof(kWantSlots)) == 0);
  CHECK(kv_indices[3] == 77); /* beyond the last row */

  attention.kv_indices = kv_indices;
  attention.num_kv_indices = 3;
  PoisonOutputs();
  CHECK_OK(sparsemla_attention(engine->backend, &attention, engine->plan, engine->workspace,
                               engine->workspace_bytes, NULL));
  CHECK_OK(
      sparsemla_plan_partials(engine->plan, engine->workspace, engine->workspace_bytes, &partials));
  merge.partials = &partials;
  merge.out = attention.out;
  merge.lse = attention.lse;
  CHECK_OK(sparsemla_merge(engine->backend, &merge, NULL));
  CheckAnswers();
}

static void DenseConversionMarksAndCountsEntriesThatNameNoRow(const Engine* engine) {
  static const int32_t kReqIds[kTokens] = {0, 1, 2};
  int32_t slots[kTokens][kTopk];
  int32_t counts[kTokens];
  const sparsemla_run_params run = RunParams(NULL);
  sparsemla_convert_indices_dense_params params = SPARSEMLA_CONVERT_INDICES_DENSE_PARAMS_INIT;
  params.num_tokens = kTokens;
  params.block_size = run.block_size;
  params.topk_indices = run.topk_indices;
  params.block_table = run.block_table;
  params.num_blocks = run.num_blocks;
  params.req_id_per_token = kReqIds;
  params.slots = Tensor2(slots, SPARSEMLA_INT32, kTokens, kTopk);
  params.valid_counts = counts;
  params.invalid_slot = -7;
  CHECK_OK(sparsemla_convert_indices_dense(engine->backend, &params, NULL));
  CHECK(slots[0][0] == 4 && slots[0][1] == -7);
  CHECK(slots[1][0] == 9 && slots[1][1] == 8);
  CHECK(slots[2][0] == -7 && slots[2][1] == -7);
  CHECK(counts[0] == 1 && counts[1] == 2 && counts[2] == 0);
}

static void KpoolRowsAreFittedWithTheirTailKept(const Engine* engine) {
  int32_t rows[1][3] = {{5, -1, 9}}; /* two history columns, one of the tail */
  int32_t fitted[1][2];
  sparsemla_tensor result = SPARSEMLA_NO_TENSOR;
  sparsemla_fit_kpool_indices_params params = SPARSEMLA_FIT_KPOOL_INDICES_PARAMS_INIT;
  params.topk_tokens = 2;
  params.topk_indices = Tensor2(rows, SPARSEMLA_INT32, 1, 3);
  params.fitted = Tensor2(fitted, SPARSEMLA_INT32, 1, 2);
  CHECK_OK(sparsemla_fit_kpool_indices(engine->backend, &params, NULL, &result));
  CHECK(result.data == fitted && result.ndim == 2 && result.shape[1] == 2);
  CHECK(result.dtype == SPARSEMLA_INT32 && result.strides[0] == 2 && result.strides[1] == 1);
  CHECK(fitted[0][0] == 5 && fitted[0][1] == 9);
}

static void MergeWeighsTheStatesOfTwoRanks(const Engine* engine) {
  float part_out[2][1][2] = {{{1.0f, 0.0f}}, {{3.0f, 0.0f}}};
  float part_lse[2][1] = {{0.0f}, {0.0f}};
  static const int32_t kIndptr[2] = {0, 2};
  static const sparsemla_row_range kFinal[1] = {{0, 1}};
  static const int32_t kMap[2] = {0, 1};
  float merged[1][1][2] = {{{NAN, NAN}}};
  float merged_lse[1][1] = {{NAN}};
  sparsemla_partials partials = SPARSEMLA_PARTIALS_INIT;
  sparsemla_merge_params params = SPARSEMLA_MERGE_PARAMS_INIT;
  partials.out = Tensor3(part_out, 2, 1, 2);
  partials.lse = Tensor2(part_lse, SPARSEMLA_FLOAT32, 2, 1);
  partials.reduce_indptr = kIndptr;
  partials.reduce_final_map = kFinal;
  partials.reduce_partial_map = kMap;
  partials.num_groups = 1;
  partials.num_reduce_partials = 2;
  params.partials = &partials;
  params.out = Tensor3(merged, 1, 1, 2);
  params.lse = Tensor2(merged_lse, SPARSEMLA_FLOAT32, 1, 1);
  CHECK_OK(sparsemla_merge(engine->backend, &params, NULL));
  CHECK_NEAR(merged[0][0][0], 2.0f);
  CHECK_NEAR(merged_lse[0][0], kLog2);
}

static void PlanShowsEveryArray(const Engine* engine) {
  static const int32_t kWantIndptr[kTokens + 1] = {0, 1, 3, 3};
  static const int32_t kWantReqIds[kTokens] = {0, 1, 2};
  sparsemla_plan_params params = PlanParams();
  sparsemla_plan_info info;
  sparsemla_schedule schedule;
  int changed = -1;
  int32_t keys = 0;
  info.struct_size = sizeof(info);
  schedule.struct_size = sizeof(schedule);
  CHECK_OK(sparsemla_plan_get_info(engine->plan, &info));
  CHECK(info.built == 1 && info.num_tokens == kTokens && info.num_reqs == kTokens);
  CHECK(info.num_decodes == 3 && info.num_prefills == 0 && info.num_kv_indices == 3);
  CHECK(memcmp(info.kv_indptr, kWantIndptr, sizeof(kWantIndptr)) == 0);
  CHECK(memcmp(info.req_id_per_token, kWantReqIds, sizeof(kWantReqIds)) == 0);
  CHECK(info.num_kv_indptr_padded == 9 && info.kv_indptr_padded[8] == 3);

  CHECK_OK(sparsemla_plan_get_schedule(engine->plan, &schedule));
  CHECK(schedule.num_virtual_rows == kTokens && schedule.fold == 1);
  CHECK(schedule.work_indptr[schedule.num_compute_units] == schedule.num_work_items);
  for (int32_t i = 0; i < schedule.num_work_items; ++i) {
    keys += schedule.work_items[i].kv_end - schedule.work_items[i].kv_begin;
  }
  CHECK(keys == 3);
  CHECK(schedule.reduce_indptr[kTokens] == schedule.num_partials);

  CHECK_OK(sparsemla_plan_build(engine->plan, &params, &changed)); /* the same step again */
  CHECK(changed == 0);
}

/* Work of an engine's own threads: here the calling one, and it counts. */
static void CountingParallelFor(void* context, int32_t count, sparsemla_task task, void* argument) {
  *(int*)context += 1;
  for (int32_t i = 0; i < count; ++i) task(argument, i);
}

static void WorkRunsOnTheCallersThreads(void) {
  int num_calls = 0;
  Engine engine;
  sparsemla_backend_options options = SPARSEMLA_BACKEND_OPTIONS_INIT;
  options.num_threads = 2;
  options.parallel_for = CountingParallelFor;
  options.parallel_for_context = &num_calls;
  engine = MakeEngine("cpu", &options);
  WholeCallGivesTheAnswersFoundByHand(&engine);
  CHECK(num_calls > 0);
  DestroyEngine(&engine);
}

static void BackendsAnswerQuestions(const Engine* engine, const char* name) {
  const char* reason = NULL;
  int num_selected = 0;
  sparsemla_device_info device;
  sparsemla_kernel_info kernel;
  sparsemla_problem problem = SPARSEMLA_PROBLEM_INIT;
  device.struct_size = sizeof(device);
  kernel.struct_size = sizeof(kernel);
  CHECK_OK(sparsemla_backend_device(engine->backend, &device));
  CHECK(strcmp(device.backend, name) == 0 && device.num_compute_units >= 1);
  for (int32_t i = 0; i < sparsemla_backend_num_kernels(engine->backend); ++i) {
    CHECK_OK(sparsemla_backend_kernel(engine->backend, i, &kernel));
    CHECK(kernel.name[0] != '\0');
    num_selected += kernel.selected;
  }
  CHECK(num_selected == 1);
  CHECK_ERROR(sparsemla_backend_kernel(engine->backend, -1, &kernel), SPARSEMLA_INVALID_ARGUMENT,
              "index is -1");
  problem.dims.num_heads = 16;
  CHECK_OK(sparsemla_backend_unsupported_reason(engine->backend, &problem, &reason));
  CHECK(strcmp(reason, "") == 0);
  problem.dims.num_heads = 129;
  CHECK_OK(sparsemla_backend_unsupported_reason(engine->backend, &problem, &reason));
  CHECK(strstr(reason, "129") != NULL);
}

static void AiterSizesAreThoseOfAiter(void) {
  sparsemla_aiter_size_params params = SPARSEMLA_AITER_SIZE_PARAMS_INIT;
  sparsemla_aiter_buffer_sizes sizes;
  sizes.struct_size = sizeof(sizes);
  params.num_compute_units = 304;
  params.max_num_tokens = 4;
  params.num_heads = 16;
  CHECK_OK(sparsemla_get_aiter_buffer_sizes(&params, &sizes));
  CHECK(sizes.work_meta_data == 2 && sizes.work_indptr == 305 && sizes.reduce_indptr == 5);
  params.num_heads = 7;
  CHECK_ERROR(sparsemla_get_aiter_buffer_sizes(&params, &sizes), SPARSEMLA_INVALID_ARGUMENT, "7");
}

static void ErrorsNameArgumentsAndValues(const Engine* engine) {
  const sparsemla_status invalid = SPARSEMLA_INVALID_ARGUMENT;
  sparsemla_backend* backend = NULL;
  sparsemla_plan* plan = NULL;
  size_t bytes = 0;
  sparsemla_plan_params plan_params = PlanParams();
  sparsemla_attention_params attention = AttentionParams();
  sparsemla_run_params run = RunParams(&attention);
  sparsemla_plan_capacity capacity = Capacity(engine->backend);
  CHECK_ERROR(sparsemla_backend_create("tpu", NULL, &backend), invalid, "tpu");
  CHECK_ERROR(sparsemla_backend_create(NULL, NULL, &backend), invalid, "name is null");
  CHECK_ERROR(sparsemla_backend_create("ref", NULL, NULL), invalid, "backend is null");
  CHECK_ERROR(sparsemla_backend_device(NULL, NULL), invalid, "backend is null");
  CHECK_ERROR(sparsemla_backend_device(engine->backend, NULL), invalid, "info is null");
  CHECK_ERROR(sparsemla_plan_create(NULL, &plan), invalid, "capacity is null");
  CHECK_ERROR(sparsemla_plan_create(&capacity, NULL), invalid, "plan is null");
  CHECK_ERROR(sparsemla_workspace_bytes(engine->backend, &capacity, -1, &bytes), invalid, "-1");
  CHECK_ERROR(sparsemla_plan_build(NULL, &plan_params, NULL), invalid, "plan is null");
  plan_params.seq_lens = NULL;
  CHECK_ERROR(sparsemla_plan_build(engine->plan, &plan_params, NULL), invalid, "seq_lens is null");
  plan_params.num_reqs = -5;
  CHECK_ERROR(sparsemla_plan_build(engine->plan, &plan_params, NULL), invalid, "-5");
  plan_params = PlanParams();
  plan_params.q_dtype = 99;
  CHECK_ERROR(sparsemla_plan_build(engine->plan, &plan_params, NULL), invalid, "q_dtype is 99");

#define RUN(with, workspace, size) \
  sparsemla_run((with)->backend, &run, (with)->plan, (workspace), (size), NULL)
  CHECK_ERROR(RUN(engine, NULL, 0), SPARSEMLA_RESOURCE_EXHAUSTED, "workspace");
  CHECK_ERROR(RUN(engine, engine->workspace, 64), SPARSEMLA_RESOURCE_EXHAUSTED, "64");
  attention.lse.dtype = SPARSEMLA_BFLOAT16;
  CHECK_ERROR(RUN(engine, engine->workspace, engine->workspace_bytes), invalid, "lse.dtype is 1");
  attention = AttentionParams();
  attention.out.ndim = 2;
  CHECK_ERROR(RUN(engine, engine->workspace, engine->workspace_bytes), invalid, "out has ndim 2");
  attention = AttentionParams();
  attention.q_scale = NAN;
  CHECK_ERROR(RUN(engine, engine->workspace, engine->workspace_bytes), invalid, "q_scale is nan");
  attention = AttentionParams();
  attention.q.dtype = SPARSEMLA_BFLOAT16;
  CHECK_ERROR(RUN(engine, engine->workspace, engine->workspace_bytes),
              SPARSEMLA_FAILED_PRECONDITION, "q is bf16");
  attention = AttentionParams();
  run.topk_indices.shape[1] = INT64_MAX;
  CHECK_ERROR(RUN(engine, engine->workspace, engine->workspace_bytes), invalid, "topk_indices");
  run.attention = NULL;
  run.topk_indices.shape[1] = kTopk;
  CHECK_ERROR(RUN(engine, engine->workspace, engine->workspace_bytes), invalid,
              "params.attention is null");
#undef RUN
  sparsemla_plan_destroy(NULL);
  sparsemla_backend_destroy(NULL);
}

static void AnEmptyPlanIsNotRun(const Engine* engine) {
  sparsemla_plan* plan = NULL;
  sparsemla_plan_info info;
  sparsemla_partials partials = SPARSEMLA_PARTIALS_INIT;
  const sparsemla_attention_params attention = AttentionParams();
  const sparsemla_run_params run = RunParams(&attention);
  const sparsemla_plan_capacity capacity = Capacity(engine->backend);
  info.struct_size = sizeof(info);
  CHECK_OK(sparsemla_plan_create(&capacity, &plan));
  CHECK_OK(sparsemla_plan_get_info(plan, &info));
  CHECK(info.built == 0 && info.kv_indptr == NULL);
  CHECK_ERROR(
      sparsemla_run(engine->backend, &run, plan, engine->workspace, engine->workspace_bytes, NULL),
      SPARSEMLA_FAILED_PRECONDITION, "Build");
  CHECK_ERROR(sparsemla_plan_partials(plan, engine->workspace, engine->workspace_bytes, &partials),
              SPARSEMLA_FAILED_PRECONDITION, "plan");
  sparsemla_plan_destroy(plan);
}

static void OlderAndNewerStructsAreUnderstood(const Engine* engine) {
  sparsemla_plan* plan = NULL;
  sparsemla_plan_capacity capacity = Capacity(engine->backend);
  sparsemla_plan_info info;
  struct {
    sparsemla_plan_capacity known;
    int32_t added;
  } newer;

  /* Older: what lies beyond struct_size is not read. */
  capacity.struct_size = offsetof(sparsemla_plan_capacity, max_splits);
  capacity.max_splits = -1000;
  capacity.aiter_target = 77;
  CHECK_OK(sparsemla_plan_create(&capacity, &plan));
  sparsemla_plan_destroy(plan);

  capacity = Capacity(engine->backend);
  capacity.struct_size = 0;
  CHECK_ERROR(sparsemla_plan_create(&capacity, &plan), SPARSEMLA_INVALID_ARGUMENT,
              "capacity.struct_size is 0");

  newer.known = Capacity(engine->backend);
  newer.known.struct_size = sizeof(newer);
  newer.added = 0;
  CHECK_OK(sparsemla_plan_create(&newer.known, &plan));
  sparsemla_plan_destroy(plan);
  newer.added = 1;
  CHECK_ERROR(sparsemla_plan_create(&newer.known, &plan), SPARSEMLA_INVALID_ARGUMENT,
              "newer than this library");

  /* An older output struct: nothing is written beyond its size. */
  memset(&info, 0x55, sizeof(info));
  info.struct_size = offsetof(sparsemla_plan_info, num_reqs);
  CHECK_OK(sparsemla_plan_get_info(engine->plan, &info));
  CHECK(info.num_tokens == kTokens && info.num_reqs == 0x55555555);
  CHECK(info.struct_size == offsetof(sparsemla_plan_info, num_reqs));
}

static void* LastErrorLength(void* length) {
  *(size_t*)length = strlen(sparsemla_last_error());
  return NULL;
}

static void EveryThreadHasItsOwnLastError(void) {
  pthread_t thread;
  size_t length = 99;
  CHECK_ERROR(sparsemla_plan_create(NULL, NULL), SPARSEMLA_INVALID_ARGUMENT, "null");
  CHECK(pthread_create(&thread, NULL, LastErrorLength, &length) == 0);
  CHECK(pthread_join(thread, NULL) == 0);
  CHECK(length == 0);
  CHECK(strlen(sparsemla_last_error()) > 0);
}

int main(void) {
  static const char* const kBackends[] = {"ref", "cpu"};
  CHECK(sparsemla_version() == SPARSEMLA_ABI_MAJOR * 1000 + SPARSEMLA_ABI_MINOR);
  CHECK(sparsemla_library_version()[0] != '\0');
  FillInputs();
  for (int b = 0; b < 2; ++b) {
    Engine engine = MakeEngine(kBackends[b], NULL);
    if (num_failures > 0) return 1; /* nothing to work with */
    WholeCallGivesTheAnswersFoundByHand(&engine);
    SinksJoinTheSoftmaxWithoutAValue(&engine);
    StagesOneByOneGiveTheSameAnswers(&engine);
    DenseConversionMarksAndCountsEntriesThatNameNoRow(&engine);
    KpoolRowsAreFittedWithTheirTailKept(&engine);
    MergeWeighsTheStatesOfTwoRanks(&engine);
    PlanShowsEveryArray(&engine);
    BackendsAnswerQuestions(&engine, kBackends[b]);
    ErrorsNameArgumentsAndValues(&engine);
    AnEmptyPlanIsNotRun(&engine);
    OlderAndNewerStructsAreUnderstood(&engine);
    DestroyEngine(&engine);
  }
  WorkRunsOnTheCallersThreads();
  AiterSizesAreThoseOfAiter();
  EveryThreadHasItsOwnLastError();
  printf(num_failures == 0 ? "C ABI: all checks passed\n" : "C ABI: FAILED\n");
  return num_failures == 0 ? 0 : 1;
}
