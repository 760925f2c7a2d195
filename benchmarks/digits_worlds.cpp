// Whole training runs of the convergence study's `digits` task, all workers in one thread: written anew by docs/algorithms.md and the
// library's schedules, and sharing no line with it, so that it is a second opinion on it as well. See digits_worlds.py.
//
// Numbers are fp32 and sums are taken in another order than the library's, so a run agrees with the library's to rounding until
// that turns a first bit, and in distribution over seeds after that (tests/test_digits_worlds.py).

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace {

using Vec = std::vector<float>;

constexpr int kInputs = 100, kHidden = 96, kUpper = 48, kClasses = 10, kTensors = 6;
constexpr int kOffset[kTensors + 1] = {0, 9600, 9696, 14304, 14352, 14832, 14842};  // weights and biases of three layers
constexpr int kSize = kOffset[kTensors];
constexpr int kBlock = 2048;
constexpr double kBeta1 = 0.9, kBeta2 = 0.999, kEps = 1e-8;
constexpr int kRefreshSteps = 4;

enum Algorithm { kAdamW, kLamb, kOnebitAdam, kOnebitLamb, kZeroOneAdam, kBinSGDM };

}  // namespace

// of digits_worlds.py, field by field
struct Config {
  double algorithm, lr, weight_decay, steps, workers, batch, freeze_step, scale_factor;
  double var_update_scaler, var_rise_steps, local_step_scaler, local_step_clipper, denominator_floor, beta, magnitude_beta, seed;
  double refresh_interval;  // steps; -1: by themselves
  double ratio_interval;
  double server_scale_factor;
};

namespace {

// Mean gradient of the perceptron over `count` images (100 pixels and a label each).
void gradient(const float* weights, const float* const* images, int count, float* out) {
  static thread_local float hidden[kHidden], upper[kUpper], logits[kClasses], d_hidden[kHidden], d_upper[kUpper];
  std::fill(out, out + kSize, 0.f);
  const float *w0 = weights, *c0 = w0 + kOffset[1], *w1 = w0 + kOffset[2], *c1 = w0 + kOffset[3], *w2 = w0 + kOffset[4], *c2 = w0 + kOffset[5];
  float *g0 = out, *h0 = out + kOffset[1], *g1 = out + kOffset[2], *h1 = out + kOffset[3], *g2 = out + kOffset[4], *h2 = out + kOffset[5];
  auto layer = [](const float* w, const float* bias, const float* in, int width, int rows, float* result, bool rectified) {
    for (int a = 0; a < rows; a++) {
      float sum = 0;
      for (int i = 0; i < width; i++) sum += w[a * width + i] * in[i];
      sum += bias[a];
      result[a] = rectified && sum <= 0 ? 0.f : sum;
    }
  };
  for (int k = 0; k < count; k++) {
    const float* image = images[k];
    const int label = static_cast<int>(image[kInputs]);
    layer(w0, c0, image, kInputs, kHidden, hidden, true);
    layer(w1, c1, hidden, kHidden, kUpper, upper, true);
    layer(w2, c2, upper, kUpper, kClasses, logits, false);
    const float largest = *std::max_element(logits, logits + kClasses);
    float total = 0;
    for (float& logit : logits) total += logit = std::exp(logit - largest);
    std::fill(d_upper, d_upper + kUpper, 0.f);
    for (int a = 0; a < kClasses; a++) {
      const float d = (logits[a] / total - (a == label)) / count;
      h2[a] += d;
      for (int i = 0; i < kUpper; i++) g2[a * kUpper + i] += d * upper[i], d_upper[i] += d * w2[a * kUpper + i];
    }
    std::fill(d_hidden, d_hidden + kHidden, 0.f);
    for (int a = 0; a < kUpper; a++) {
      if (upper[a] <= 0) continue;
      const float d = d_upper[a];
      h1[a] += d;
      for (int i = 0; i < kHidden; i++) g1[a * kHidden + i] += d * hidden[i], d_hidden[i] += d * w1[a * kHidden + i];
    }
    for (int a = 0; a < kHidden; a++) {
      if (hidden[a] <= 0) continue;
      const float d = d_hidden[a];
      h0[a] += d;
      for (int i = 0; i < kInputs; i++) g0[a * kInputs + i] += d * image[i];
    }
  }
}

double schedule(int step, int steps) {
  const int rise = std::max(1, steps / 20);
  return step < rise ? (step + 1.0) / rise : 0.5 * (1 + std::cos(M_PI * (step - rise) / std::max(1, steps - rise)));
}

double norm(const Vec& values, int tensor) {
  double sum = 0;
  for (int j = kOffset[tensor]; j < kOffset[tensor + 1]; j++) sum += static_cast<double>(values[j]) * values[j];
  return std::sqrt(sum);
}

// BinSGDM's draws (docs/algorithms.md): a hash of seed, rank, stream and element, turned further by a fixed part in every step.
struct Draws {
  static uint32_t mix(uint32_t h) {
    h = (h ^ (h >> 16)) * 0x7FEB352Du;
    h = (h ^ (h >> 15)) * 0x846CA68Bu;
    return h ^ (h >> 16);
  }

  // The start of a stream, of all elements. Blocks are numbered from the last parameter on.
  static void begin(uint64_t seed, uint64_t rank, uint64_t stream, uint32_t* out) {
    uint64_t state = 0;
    for (uint64_t field : {seed, uint64_t{0}, rank, stream}) {
      uint64_t z = state += field + 0x9E3779B97F4A7C15u;
      z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
      z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
      state = z ^ (z >> 31);
    }
    uint32_t block = 0;
    for (int k = kTensors - 1; k >= 0; k--)
      for (int lo = kOffset[k]; lo < kOffset[k + 1]; lo += kBlock, block++) {
        const uint32_t start = mix(block ^ static_cast<uint32_t>(state));
        for (int j = lo; j < std::min(lo + kBlock, kOffset[k + 1]); j++)
          out[j] = mix((start + static_cast<uint32_t>(j - lo) * 0x9E3779B9u) ^ static_cast<uint32_t>(state >> 32));
      }
  }

  static float uniform(uint32_t h) { return static_cast<float>(static_cast<int32_t>(2 * (h >> 9) + 1) - (1 << 23)) * 0x1p-23f; }
};

// When frozen second moments are refreshed (docs/freeze.md): the energy of exchanged steps has fallen to 0.8 of its highest.
struct Shrinking {
  double mean = 0, highest = 0, pending = -1;
  int seen = 0;
  double average() const { return seen ? mean / (1 - std::pow(0.95, seen)) : 0; }
  bool due(double energy, int steps) {  // the last step's energy counts in the next step; -1: nothing was exchanged
    if (pending >= 0) {
      mean += (pending - mean) / 20;
      if (++seen >= 20) highest = std::max(highest, average());
    }
    pending = energy;
    return steps > 100 && average() < 0.8 * highest;
  }
};

class World {
 public:
  World(const Config& config, const float* start, const int32_t* rows, const float* images)
      : x(start, start + kSize), config_(config), n_(static_cast<int>(config.workers)), rows_(rows), images_(images) {
    for (Vec* flat : {&m, &v, &r, &u, &server_, &mean_, &own_, &sum_, &y_, &sent_}) flat->assign(kSize, 0.f);
    residuals_.assign(static_cast<size_t>(n_) * kSize, 0.f);
    interval_ = static_cast<int>(config_.refresh_interval);
  }

  void run() {
    switch (static_cast<Algorithm>(static_cast<int>(config_.algorithm))) {
      case kAdamW:
      case kLamb:
        for (begin(0); step_ < config_.steps; begin(step_ + 1)) dense();
        break;
      case kOnebitAdam:
      case kOnebitLamb: run_frozen(); break;
      case kZeroOneAdam: run_zero_one(); break;
      case kBinSGDM: run_binsgdm(); break;
    }
  }

  Vec x;
  double dense_rounds = 0, bit_rounds = 0;

 private:
  Config config_;
  int n_;
  const int32_t* rows_;
  const float* images_;
  Vec m, v, r, u;  // moments, reciprocal denominators, the momentum in units of the step that it makes
  Vec residuals_, server_, mean_, own_, sum_, y_, sent_;
  int step_ = 0;
  double lr_ = 0, lr_t_ = 0, updates_ = 0, energy_ = 0;  // updates_: that v has had; energy_: of what the last exchange brought
  // refreshes of frozen second moments
  Shrinking shrinking_;
  int unrefreshed_ = 0, interval_ = -1;
  bool refreshing_ = false;
  // 1-bit LAMB, by tensor
  double coefficient_[kTensors] = {}, measured_[kTensors] = {}, norm2_[kTensors] = {}, product_[kTensors] = {}, reference_[kTensors] = {};
  int ratio_steps_ = 0;

  bool lamb() const { return config_.algorithm == kLamb || config_.algorithm == kOnebitLamb; }

  void begin(int step) {
    step_ = step;
    lr_ = config_.lr * schedule(step, static_cast<int>(config_.steps));
    lr_t_ = lr_ / (1 - std::pow(kBeta1, step + 1));
  }

  // ----- gradients ------------------------------------------------------------------------------------------------

  void average_gradient() {
    dense_rounds++;
    part(0, static_cast<int>(config_.batch), x.data(), mean_.data());
  }

  void own_gradient(int rank, const float* weights) {
    const int count = static_cast<int>(config_.batch) / n_;
    part(rank * count, count, weights, own_.data());
  }

  void part(int first, int count, const float* weights, float* out) {
    std::vector<const float*> images(count);
    const int32_t* rows = rows_ + static_cast<size_t>(step_) * static_cast<int>(config_.batch) + first;
    for (int k = 0; k < count; k++) images[k] = images_ + static_cast<size_t>(rows[k]) * (kInputs + 1);
    gradient(weights, images.data(), count, out);
  }

  // ----- dense steps ----------------------------------------------------------------------------------------------

  void learn(double updates) {
    const float keep = static_cast<float>(std::pow(kBeta2, updates)), b1 = static_cast<float>(kBeta1);
    for (int j = 0; j < kSize; j++) {
      m[j] += (mean_[j] - m[j]) * (1 - b1);
      v[j] = v[j] * keep + (1 - keep) * mean_[j] * mean_[j];
    }
    updates_ += updates;
  }

  void dense() {  // AdamW or LAMB
    average_gradient();
    learn(1);
    const float root = static_cast<float>(1 / std::sqrt(1 - std::pow(kBeta2, updates_))), eps = static_cast<float>(kEps);
    const float first = static_cast<float>(1 - std::pow(kBeta1, step_ + 1)), decay = static_cast<float>(config_.weight_decay);
    for (int j = 0; j < kSize; j++) y_[j] = m[j] / first / (std::sqrt(v[j]) * root + eps) + decay * x[j];
    for (int k = 0; k < kTensors; k++) {
      const double weights = norm(x, k), update = norm(y_, k);
      coefficient_[k] = !lamb() || weights == 0 || update == 0 ? 1 : std::clamp(weights / update, 0.01, 10.0);
      const float by = static_cast<float>(lr_ * coefficient_[k]);
      for (int j = kOffset[k]; j < kOffset[k + 1]; j++) x[j] -= by * y_[j];
    }
  }

  void move() {  // by momenta and denominators as they are
    for (int k = 0; k < kTensors; k++) {
      const double c = lamb() ? coefficient_[k] : 1;
      const float decay = static_cast<float>(1 - lr_ * c * config_.weight_decay), by = static_cast<float>(lr_t_ * c);
      for (int j = kOffset[k]; j < kOffset[k + 1]; j++) x[j] = x[j] * decay - by * m[j] * r[j];
    }
  }

  void invert() {
    const float correction = static_cast<float>(1 - std::pow(kBeta2, updates_));
    for (int k = 0; k < kTensors; k++) {
      double total = 0;
      int count = 0;
      for (int j = kOffset[k]; j < kOffset[k + 1]; j++) total += v[j], count += v[j] != 0;
      const float typical = static_cast<float>(count ? total / count : 0), least = static_cast<float>(typical * config_.denominator_floor * config_.denominator_floor);
      for (int j = kOffset[k]; j < kOffset[k + 1]; j++) {
        const float value = v[j] == 0 ? typical : std::max(v[j], least);
        r[j] = typical > 0 ? 1 / (std::sqrt(value / correction) + static_cast<float>(kEps)) : 0;
      }
    }
  }

  void to_steps() {
    for (int j = 0; j < kSize; j++) u[j] = m[j] * r[j];
  }

  void to_momenta(const Vec& steps, double unit) {
    for (int j = 0; j < kSize; j++) m[j] = r[j] > 0 ? steps[j] / static_cast<float>(unit) / r[j] : 0;
  }

  // ----- the exchange ---------------------------------------------------------------------------------------------

  static float scale(const float* values, int length, double factor) {
    float sum = 0;
    for (int j = 0; j < length; j++) sum += values[j] * values[j];
    return std::sqrt(sum / length) * static_cast<float>(factor);
  }

  template <class Visit>
  static void for_blocks(Visit visit) {
    for (int k = 0; k < kTensors; k++)
      for (int lo = kOffset[k]; lo < kOffset[k + 1]; lo += kBlock) visit(lo, std::min(kBlock, kOffset[k + 1] - lo));
  }

  // `value(rank)` leaves in y_ what a worker wants averaged; the result is in sent_.
  template <class Value>
  void exchange(Value value) {
    bit_rounds++;
    std::fill(sum_.begin(), sum_.end(), 0.f);
    for (int rank = 0; rank < n_; rank++) {
      value(rank);
      float* owed = &residuals_[static_cast<size_t>(rank) * kSize];
      for (int j = 0; j < kSize; j++) y_[j] += owed[j];
      for_blocks([&](int lo, int length) {
        const float s = scale(&y_[lo], length, config_.scale_factor);
        for (int j = lo; j < lo + length; j++) {
          const float sent = y_[j] < 0 ? -s : s;
          sum_[j] += sent;
          owed[j] = y_[j] - sent;
        }
      });
    }
    for (int j = 0; j < kSize; j++) y_[j] = sum_[j] / n_ + server_[j];
    energy_ = 0;
    for_blocks([&](int lo, int length) {
      const float s = scale(&y_[lo], length, config_.server_scale_factor);
      for (int j = lo; j < lo + length; j++) {
        sent_[j] = y_[j] < 0 ? -s : s;
        server_[j] = y_[j] - sent_[j];
      }
      energy_ += static_cast<double>(s) * s * length;
    });
  }

  // ----- 1-bit Adam, 1-bit LAMB -----------------------------------------------------------------------------------

  void run_frozen() {
    const int steps = static_cast<int>(config_.steps), frozen = static_cast<int>(config_.freeze_step);
    for (begin(0); step_ < steps; begin(step_ + 1)) {
      if (step_ < frozen) {
        dense();
        if (step_ + 1 == frozen) invert(), to_steps();
      } else if (refresh_due()) {
        if (!refreshing_) to_momenta(u, 1);
        if (refresh()) to_steps();
      } else {
        compressed();
      }
    }
  }

  void compressed() {
    const bool measuring = lamb() && (ratio_steps_ < 10 || (ratio_steps_ + 1) % static_cast<int>(config_.ratio_interval) == 0);
    double energy[kTensors] = {}, signal[kTensors] = {};
    const float b1 = static_cast<float>(kBeta1);
    exchange([&](int rank) {
      own_gradient(rank, x.data());
      for (int j = 0; j < kSize; j++) y_[j] = b1 * u[j] + (1 - b1) * (own_[j] * r[j]);
      if (!measuring) return;
      for (int k = 0; k < kTensors; k++)
        for (int j = kOffset[k]; j < kOffset[k + 1]; j++) {
          const double h = static_cast<double>(own_[j]) * r[j];
          energy[k] += h * h / n_ / n_, signal[k] += h * u[j] / n_;
        }
    });
    u = sent_;
    for (int k = 0; k < kTensors; k++) {
      const double c = lamb() ? coefficient_[k] : 1;
      const float decay = static_cast<float>(1 - lr_ * c * config_.weight_decay), by = static_cast<float>(lr_t_ * c);
      for (int j = kOffset[k]; j < kOffset[k + 1]; j++) x[j] = x[j] * decay - by * u[j];
    }
    ratio_steps_++;
    if (measuring) follow(energy, signal);
    unrefreshed_++;
    if (interval_ >= 0) return;
    if (!lamb()) {
      if (shrinking_.due(energy_, unrefreshed_)) interval_ = unrefreshed_;
    } else if (unrefreshed_ >= 50 && unrefreshed_ % 10 == 0) {
      double now = 0, then = 0;
      for (int k = 0; k < kTensors; k++) now += norm2_[k], then += reference_[k];
      if (now > then * 1.3 && then > 0) interval_ = unrefreshed_;
    }
  }

  void follow(const double* energy, const double* signal) {
    const double first = 1 - std::pow(kBeta1, step_ + 1);
    for (int k = 0; k < kTensors; k++) {
      const double weights = norm(x, k);
      if (energy[k] <= 0 || weights <= 0) continue;
      const double weight = std::max(1 / ++measured_[k], std::min(1.0, config_.ratio_interval / 50));
      norm2_[k] += weight * (energy[k] - norm2_[k]);
      product_[k] += weight * (signal[k] - product_[k]);
      if (measured_[k] <= 10) reference_[k] = norm2_[k];
      const double shared = std::max(product_[k], 0.0);
      const double momentum = (2 * kBeta1 * shared + (1 - kBeta1) * (norm2_[k] + (1 - 1.0 / n_) * shared)) / (1 + kBeta1);
      const double decayed = config_.weight_decay * weights;
      coefficient_[k] = std::clamp(weights / std::sqrt(momentum / first / first + decayed * decayed), 0.01, 10.0);
    }
  }

  // ----- refreshes ------------------------------------------------------------------------------------------------

  bool refresh_due() const { return interval_ >= 0 && unrefreshed_ >= interval_; }

  // A dense step in which second moments learn; true with the last one.
  bool refresh() {
    if (!refreshing_) {
      refreshing_ = true;
      const float correction = static_cast<float>(1 - std::pow(kBeta2, updates_));
      for (int j = 0; j < kSize; j++) {
        const float root = r[j] > 0 ? std::max(0.f, 1 / r[j] - static_cast<float>(kEps)) : 0;
        v[j] = root * root * correction;
      }
    }
    average_gradient();
    learn(1 + interval_ / kRefreshSteps);
    move();
    if (++unrefreshed_ < interval_ + kRefreshSteps) return false;
    invert();
    unrefreshed_ = 0, interval_ = static_cast<int>(config_.refresh_interval), refreshing_ = false, shrinking_ = Shrinking();
    ratio_steps_ = 0;
    for (auto* numbers : {measured_, norm2_, product_, reference_}) std::fill(numbers, numbers + kTensors, 0.0);
    return true;
  }

  // ----- 0/1 Adam -------------------------------------------------------------------------------------------------

  void run_zero_one() {
    constexpr int kSettled = 32;  // refreshes after which steps are compressed, and not momenta
    constexpr int kWait = 4;      // times as long as lr rises, if it does when gaps would grow, every step refreshes
    const int steps = static_cast<int>(config_.steps), frozen = static_cast<int>(config_.freeze_step);
    const int scaler = static_cast<int>(config_.var_update_scaler);
    const float b1 = static_cast<float>(kBeta1);
    int counted = 0, refreshes = 0, next = 1, last = 0, risen = 0;
    double last_lr = -1;
    bool one_bit = false, stepwise = false;
    auto convert = [&] {  // what is owed, from momenta to steps
      stepwise = true;
      if (!one_bit) return;
      for (int rank = 0; rank < n_; rank++)
        for (int j = 0; j < kSize; j++) residuals_[static_cast<size_t>(rank) * kSize + j] *= r[j];
      for (int j = 0; j < kSize; j++) server_[j] *= r[j];
    };
    auto round = [&] {  // one bit, of all ranks at the same weights
      exchange([&](int rank) {
        own_gradient(rank, x.data());
        for (int j = 0; j < kSize; j++) y_[j] = (b1 * m[j] + (1 - b1) * own_[j]) * (stepwise ? r[j] : 1);
      });
      const float decay = static_cast<float>(1 - lr_ * config_.weight_decay), by = static_cast<float>(lr_t_);
      for (int j = 0; j < kSize; j++) x[j] = x[j] * decay - by * sent_[j] * (stepwise ? 1 : r[j]);
      if (stepwise) {
        to_momenta(sent_, 1);
      } else {
        m = sent_;
      }
    };
    for (begin(0); step_ < frozen && step_ < steps; begin(step_ + 1)) {
      const int t = step_ + 1;
      if (t < next) {
        round();
        continue;
      }
      if (one_bit) {
        average_gradient();
        learn(t - last);
        invert();
        move();
      } else {
        dense();
      }
      const bool waiting = counted >= scaler && t <= config_.var_rise_steps;
      if (waiting && last_lr >= 0 && lr_ > last_lr) risen = t;
      const bool rises = waiting && (t < kWait * risen || refreshes + 1 < kSettled);
      next = t + (rises ? 1 : 1 << (counted / scaler));
      counted += !rises, last = t, last_lr = lr_;
      if (++refreshes == kSettled) convert();
      if (!one_bit && next > t + 1) one_bit = true, invert();
    }
    if (!one_bit) one_bit = true, invert();
    if (!stepwise) convert();

    int origin = frozen, since = 0;  // steps since the last synchronisation
    double travelled = 0;
    Vec anchor, momenta, ways, weights;
    for (; step_ < steps; begin(step_ + 1)) {
      if (refresh_due() && since == 0) {
        if (refresh()) origin = std::min(step_ + 1, origin + static_cast<int>(config_.local_step_scaler));
        continue;
      }
      const double doublings = std::floor((step_ - origin) / config_.local_step_scaler);
      const int gap = static_cast<int>(std::min(config_.local_step_clipper, std::pow(2.0, doublings)));
      const bool local = since > 0 || gap > 1, meets = !local || since + 1 >= gap || (interval_ >= 0 && unrefreshed_ + 1 >= interval_);
      double energy = -1;
      if (!local) {
        round();
        energy = energy_;
      } else {
        if (since == 0) {
          anchor = x, travelled = 0;
          momenta.clear(), weights.clear(), ways.assign(static_cast<size_t>(n_) * kSize, 0.f);
          for (int rank = 0; rank < n_; rank++) {
            momenta.insert(momenta.end(), m.begin(), m.end());
            weights.insert(weights.end(), x.begin(), x.end());
          }
        }
        travelled += lr_t_;
        const float decay = static_cast<float>(1 - lr_ * config_.weight_decay), by = static_cast<float>(lr_t_);
        const float bound = static_cast<float>(lr_t_ * std::max(1.0, (1 - kBeta1) / std::sqrt(1 - kBeta2)));
        for (int rank = 0; rank < n_; rank++) {
          const size_t first = static_cast<size_t>(rank) * kSize;
          own_gradient(rank, &weights[first]);
          for (int j = 0; j < kSize; j++) {
            float& momentum = momenta[first + j];
            momentum = b1 * momentum + (1 - b1) * own_[j];
            ways[first + j] += by * momentum;
            weights[first + j] = weights[first + j] * decay - std::clamp(by * momentum * r[j], -bound, bound);
          }
        }
        for (float& value : anchor) value *= decay;
        if (meets) {
          const double together = since + 1, unit = travelled / together;
          exchange([&](int rank) {
            for (int j = 0; j < kSize; j++) y_[j] = ways[static_cast<size_t>(rank) * kSize + j] / static_cast<float>(unit) * r[j];
          });
          for (int j = 0; j < kSize; j++) x[j] = anchor[j] - static_cast<float>(unit) * sent_[j];
          to_momenta(sent_, together);
          energy = energy_ / (together * together);
        }
      }
      since = meets ? 0 : since + 1;
      if (refresh_due()) continue;  // it waits for the ranks to meet
      unrefreshed_++;
      if (interval_ < 0 && shrinking_.due(energy, unrefreshed_)) interval_ = unrefreshed_ + (since > 0);
    }
    if (since > 0) x = anchor;
  }

  // ----- BinSGDM --------------------------------------------------------------------------------------------------

  static double share(double beta, int t) { return (1 - beta) / (1 - std::pow(beta, t)); }

  void run_binsgdm() {
    constexpr uint32_t kTurn = 0xC13FA9A9u;  // of a worker's draw in one step
    const uint64_t seed = static_cast<uint64_t>(config_.seed);
    const size_t total = static_cast<size_t>(n_) * kSize;
    Vec momenta(total, 0.f), magnitudes(total, 0.f);
    std::vector<uint32_t> draws(total), first(kSize);
    std::vector<char> live(kSize, 0);
    for (int rank = 0; rank < n_; rank++) Draws::begin(seed, rank, 1, &draws[static_cast<size_t>(rank) * kSize]);
    Draws::begin(seed, 0, 2, first.data());
    for (int j = 0; j < kSize; j++) server_[j] = Draws::uniform(first[j]);
    for (begin(0); step_ < config_.steps; begin(step_ + 1)) {
      const int t = step_ + 1;
      const float new_m = static_cast<float>(share(config_.beta, t)), old_m = static_cast<float>(1 - share(config_.beta, t));
      const float new_a = static_cast<float>(share(config_.magnitude_beta, t)), old_a = static_cast<float>(1 - share(config_.magnitude_beta, t));
      const float kept = static_cast<float>(std::max(0.0, (1 - share(config_.magnitude_beta, t + 1)) / (1 - share(config_.beta, t + 1)) - 1));
      bit_rounds++;
      std::fill(sum_.begin(), sum_.end(), 0.f);
      for (int rank = 0; rank < n_; rank++) {
        const size_t start = static_cast<size_t>(rank) * kSize;
        own_gradient(rank, x.data());
        for_blocks([&](int lo, int length) {
          float *moment = &momenta[start + lo], *size = &magnitudes[start + lo], *votes = &sum_[lo];
          uint32_t* draw = &draws[start + lo];
          float squares = 0;
          for (int j = 0; j < length; j++) {
            moment[j] = old_m * moment[j] + new_m * own_[lo + j];
            size[j] = old_a * size[j] + new_a * std::fabs(own_[lo + j]);
            squares += size[j] * size[j];
          }
          const float least = std::sqrt(squares / length) * static_cast<float>(config_.denominator_floor);
          for (int j = 0; j < length; j++) {
            const float c = std::max(size[j], least), bound = c == 0 ? 1.f : c;
            draw[j] += kTurn;
            votes[j] += moment[j] > bound * Draws::uniform(draw[j]) ? 1.f : -1.f;
            moment[j] += kept * (moment[j] - std::min(std::max(moment[j], -c), c));
          }
        });
      }
      if ((t & (t - 1)) == 0)
        for (int rank = 0; rank < n_; rank++)
          for (int j = 0; j < kSize; j++) live[j] |= magnitudes[static_cast<size_t>(rank) * kSize + j] > 0;
      const float decay = static_cast<float>(1 - lr_ * config_.weight_decay), by = static_cast<float>(lr_);
      for (int j = 0; j < kSize; j++) {
        const float z = sum_[j] * (1.f / n_) + server_[j], sign = z >= 0 ? 1.f : -1.f;
        server_[j] = z - sign;
        x[j] = x[j] * decay - (live[j] ? by * sign : 0.f);
      }
    }
  }
};

}  // namespace

// Trains from `start` (14,842 weights) on `images` (101 floats each), of which `rows` names `batch` for every step.
// `out`: final weights; `rounds`: dense and one-bit ones.
extern "C" void train(const Config* config, const float* start, const int32_t* rows, const float* images, float* out, double* rounds) {
  World world(*config, start, rows, images);
  world.run();
  std::copy(world.x.begin(), world.x.end(), out);
  rounds[0] = world.dense_rounds;
  rounds[1] = world.bit_rounds;
}
