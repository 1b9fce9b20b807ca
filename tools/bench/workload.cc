#include "tools/bench/workload.h"

#include "core/require.h"
#include "trace/file.h"

namespace sparsemla::bench {
namespace {

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Result<Workload> Parse() {
    Workload workload = {.text = std::string(text_)};
    do {
      SPARSEMLA_RETURN_IF_ERROR(ParseGroup(workload));
    } while (Accept('_'));
    if (position_ != text_.size()) return Error(position_, "expected '_' or the end");
    return workload;
  }

 private:
  bool AtDigit() const {
    return position_ < text_.size() && text_[position_] >= '0' && text_[position_] <= '9';
  }
  bool Accept(char c) {
    if (position_ == text_.size() || text_[position_] != c) return false;
    ++position_;
    return true;
  }

  template <typename... Parts>
  Status Error(size_t position, const Parts&... parts) const {
    return {StatusCode::kInvalidArgument,
            StrCat("workload ", trace::Quoted(text_), ", position ", position, ": ", parts...)};
  }

  // digits [ "k" ], in [1, max].
  Result<int64_t> ParseNumber(std::string_view what, int64_t max, bool may_have_k) {
    const size_t begin = position_;
    if (!AtDigit()) return Error(begin, "expected the number of ", what);
    int64_t number = 0;
    for (; AtDigit(); ++position_) {
      number = 10 * number + (text_[position_] - '0');
      if (number > max) return Error(begin, "more than ", max, " ", what);
    }
    if (may_have_k && Accept('k')) number *= 1024;
    if (number > max) return Error(begin, "more than ", max, " ", what);
    if (number == 0) return Error(begin, "the number of ", what, " is 0");
    return number;
  }

  Status ParseGroup(Workload& workload) {
    const size_t begin = position_;
    int64_t count = 1;
    if (AtDigit()) {
      const auto requests = ParseNumber("requests", kMaxTokens, false);
      if (!requests.ok()) return requests.status();
      count = requests.value();
    }
    if (!Accept('q')) return Error(position_, "expected 'q' and the number of query tokens");
    const auto query_len = ParseNumber("query tokens", kMaxTokens, true);
    if (!query_len.ok()) return query_len.status();
    int64_t seq_len = query_len.value();
    const size_t seq_begin = position_ + 1;
    if (Accept('s')) {
      const auto given = ParseNumber("tokens of a sequence", kMaxSeqLen, true);
      if (!given.ok()) return given.status();
      seq_len = given.value();
    }
    if (seq_len < query_len.value()) {
      return Error(seq_begin, "a sequence of ", seq_len, " tokens is shorter than its query of ",
                   query_len.value());
    }
    const int64_t tokens = workload.num_tokens() + count * query_len.value();
    if (tokens > kMaxTokens) {
      return Error(begin, tokens, " query tokens in all; at most ", kMaxTokens);
    }
    for (int64_t i = 0; i < count; ++i) {
      workload.query_start_loc.push_back(workload.num_tokens() +
                                         static_cast<int32_t>(query_len.value()));
      workload.seq_lens.push_back(static_cast<int32_t>(seq_len));
    }
    return {};
  }

  std::string_view text_;
  size_t position_ = 0;
};

}  // namespace

Result<Workload> ParseWorkload(std::string_view text) {
  return Parser(text).Parse();
}

}  // namespace sparsemla::bench
