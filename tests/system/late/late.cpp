// `late`: a device of two chips, simulated on the CPU, whose work is late.
//
//   thread ──op──▶ stream (a thread of its own) ──▶ CPU kernel on the same memory, after a delay
//                    │ event: a flag that the stream sets when it comes to it
//   memory: from the host; what is freed is poisoned in the order of its stream and given out again at once
//
// Results equal those of a CPU run bit for bit, so a CPU run is what a test expects; what is read too early, or
// overwritten too early, differs.  Copies from and to pageable memory block, those of page-locked memory do not.
// The current device is each thread's own, 0 at first, and contexts are made where CUDA 12 makes them.
//
// Beside it there is a reckoned clock: each thread and each stream has a time, in seconds, that an operation
// moves on by what it would take on a real chip (`Rates`), and that waits carry from one to the other.  It
// depends on no load of this machine.
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <sys/syscall.h>
#include <unistd.h>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <unordered_map>
#include <utility>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using c10::StreamId;
using Lock = std::lock_guard<std::mutex>;

constexpr auto kLate = c10::DeviceType::PrivateUse1;
constexpr int NUM_DEVICES = 2;
constexpr int POOL = 32;  // streams of each device that are given out in turn, as CUDA's are

// -- settings and notes ------------------------------------------------------------------------------------

std::atomic<int64_t> kernel_us{0};            // real delay before each kernel
std::atomic<int64_t> bytes_per_s{0};          // real rate of copies between host and device; 0: no delay
std::atomic<bool> all_is_pinned{false};       // the strictest: no copy with non_blocking blocks
std::atomic<int64_t> streams_taken{0};

struct Rates {  // of the reckoned clock
  double launch_s = 5e-6, flops = 4e14, memory = 3e12, locked = 5e10, pageable = 5e9;
} rates;

struct Wait {
  std::string kind;
  int64_t thread;
  double seconds;  // reckoned
};
std::mutex notes_mutex;
std::vector<Wait> waits;
std::set<int> contexts;
std::vector<std::pair<int, int64_t>> contexts_by;  // device, thread

int64_t this_thread() {
  return static_cast<int64_t>(syscall(SYS_gettid));
}

void note_context(int device) {
  Lock lock(notes_mutex);
  if (contexts.insert(device).second)
    contexts_by.emplace_back(device, this_thread());
}

// A graph is not made here; what would void its capture is: waits, and what other threads ask of a device.
std::atomic<int64_t> capturing{0};  // the thread that captures
std::set<std::string> voided_by;

void note_unsafe(const std::string& kind, bool also_for_capturing = false) {
  if (!capturing || (capturing == this_thread() && !also_for_capturing))
    return;
  Lock lock(notes_mutex);
  voided_by.insert(kind);
}

// -- streams and events --------------------------------------------------------------------------------------

thread_local double host_s = 0;  // the reckoned time of this thread

void wait_until(double at_s, std::string kind) {
  note_unsafe(kind, true);
  double held = std::max(at_s - host_s, 0.0);
  host_s += held;
  Lock lock(notes_mutex);
  waits.push_back({std::move(kind), this_thread(), held});
}

// Until something is so.  It is looked at every second, too: a loaded glibc before 2.41 may lose a wake-up
// (https://sourceware.org/bugzilla/show_bug.cgi?id=25847).
template <class Reached>
void until(std::condition_variable& changed, std::unique_lock<std::mutex>& lock, Reached reached) {
  while (!changed.wait_for(lock, std::chrono::seconds(1), reached)) {
  }
}

struct Flag {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_set = false;
  double at_s = 0;
  void set() {
    Lock lock(mutex);
    is_set = true;
    changed.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    until(changed, lock, [&] { return is_set; });
  }
  bool query() {
    Lock lock(mutex);
    return is_set;
  }
};
using FlagPtr = std::shared_ptr<Flag>;

struct Queue {  // a stream
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> tasks;
  uint64_t given = 0, done = 0;
  double at_s = 0;  // when the last task given is over, reckoned
  std::string error;

  double give(double takes_s, std::function<void()> task, double not_before_s = 0) {
    host_s += rates.launch_s;
    Lock lock(mutex);
    at_s = std::max({at_s, host_s, not_before_s}) + takes_s;
    add(std::move(task));
    return at_s;
  }
  void give_unreckoned(std::function<void()> task) {
    Lock lock(mutex);
    add(std::move(task));
  }
  void add(std::function<void()> task) {
    if (!given)
      std::thread([this] { work(); }).detach();
    tasks.push_back(std::move(task));
    ++given;
    changed.notify_all();
  }
  void after(const FlagPtr& flag) {
    give(0, [flag] { flag->wait(); }, flag->at_s);
  }
  FlagPtr record() {
    auto flag = std::make_shared<Flag>();
    flag->at_s = give(0, [flag] { flag->set(); });
    return flag;
  }
  double sync() {
    std::unique_lock<std::mutex> lock(mutex);
    const uint64_t all = given;
    double at = at_s;
    until(changed, lock, [&] { return done >= all; });
    if (!error.empty()) {
      auto text = std::move(error);
      error.clear();
      TORCH_CHECK(false, "late: a kernel has failed: ", text);
    }
    return at;
  }
  bool query() {
    Lock lock(mutex);
    return done == given;
  }
  void work() {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> lock(mutex);
        until(changed, lock, [&] { return !tasks.empty(); });
        task = std::move(tasks.front());
        tasks.pop_front();
      }
      try {
        task();
      } catch (const std::exception& e) {
        Lock lock(mutex);
        error = e.what();
      }
      task = nullptr;
      Lock lock(mutex);
      ++done;
      changed.notify_all();
    }
  }
};

// By device: stream 0 is the default one, 1 to POOL are those of the pool.
Queue& queue_of(int device, StreamId id) {
  static auto* all = new Queue[NUM_DEVICES * (POOL + 1)];
  return all[device * (POOL + 1) + id];
}
Queue& queue_of(const Stream& s) {
  return queue_of(s.device_index(), s.id());
}

thread_local int real_device = 0;
thread_local int target_device = -1;
thread_local StreamId current[NUM_DEVICES] = {0, 0};

// As c10/cuda/CUDAFunctions.cpp has them: cudaSetDevice makes a context, "maybe" waits for somebody to need it.
int get_device() {
  return target_device >= 0 ? target_device : real_device;
}
void set_device(int device) {
  TORCH_CHECK(device >= 0 && device < NUM_DEVICES, "late: no device ", device);
  target_device = -1;
  if (real_device != device) {
    real_device = device;
    note_context(device);
  }
}
void maybe_set_device(int device) {
  bool has;
  {
    Lock lock(notes_mutex);
    has = contexts.count(device) > 0;
  }
  if (has)
    set_device(device);
  else
    target_device = device;
}
int exchange_device(int device) {
  int before = get_device();
  if (before != device || target_device >= 0)
    set_device(device);
  return before;
}
struct On {  // a device, in this scope, as torch's guards do it: back by "maybe"
  int before;
  explicit On(int device) : before(exchange_device(device)) {}
  ~On() { maybe_set_device(before); }
};
struct OnForSure {  // as CUDAGuardImpl does it for events: back for sure, which may make a context
  int before = get_device();
  explicit OnForSure(int device) { set_device(device); }
  ~OnForSure() { set_device(before); }
};

Queue& current_queue(int device) {
  return queue_of(device, current[device]);
}
int index_or_current(const Device& d) {
  return d.has_index() ? d.index() : get_device();
}

struct Event {
  std::mutex mutex;
  FlagPtr flag;
};
FlagPtr flag_of(void* event) {
  auto* e = static_cast<Event*>(event);
  Lock lock(e->mutex);
  return e->flag;
}

void use_on(void* data, const Stream& s);  // memory is used by another stream than its own

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return kLate; }
  Device exchangeDevice(Device d) const override { return {kLate, static_cast<DeviceIndex>(exchange_device(d.index()))}; }
  Device getDevice() const override { return {kLate, static_cast<DeviceIndex>(get_device())}; }
  void setDevice(Device d) const override { set_device(d.index()); }
  void uncheckedSetDevice(Device d) const noexcept override { maybe_set_device(d.index()); }
  static Stream stream(int device, StreamId id) {
    return Stream(Stream::UNSAFE, Device(kLate, static_cast<DeviceIndex>(device)), id);
  }
  Stream getStream(Device d) const override {
    int device = index_or_current(d);
    return stream(device, current[device]);
  }
  Stream getDefaultStream(Device d) const override { return stream(index_or_current(d), 0); }
  Stream getNewStream(Device d, int = 0) const override {
    return stream(index_or_current(d), 1 + streams_taken++ % POOL);
  }
  Stream getStreamFromGlobalPool(Device d, bool = false) const override { return getNewStream(d); }
  Stream exchangeStream(Stream s) const override {
    auto before = stream(s.device_index(), current[s.device_index()]);
    current[s.device_index()] = s.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return NUM_DEVICES; }
  void record(void** event, const Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    OnForSure on(s.device_index());
    if (!*event)
      *event = new Event;
    auto* e = static_cast<Event*>(*event);
    auto flag = queue_of(s).record();
    Lock lock(e->mutex);
    e->flag = flag;
  }
  void block(void* event, const Stream& s) const override {
    if (!event)
      return;
    OnForSure on(s.device_index());
    queue_of(s).after(flag_of(event));
  }
  void destroyEvent(void* event, const DeviceIndex device) const noexcept override {
    if (!event)
      return;
    OnForSure on(device);
    delete static_cast<Event*>(event);
  }
  bool queryEvent(void* event) const override { return !event || flag_of(event)->query(); }
  bool queryStream(const Stream& s) const override { return queue_of(s).query(); }
  void synchronizeStream(const Stream& s) const override { wait_until(queue_of(s).sync(), "stream"); }
  void synchronizeEvent(void* event) const override {
    if (!event)
      return;
    auto flag = flag_of(event);
    flag->wait();
    wait_until(flag->at_s, "event");
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    OnForSure on(device);
    double at = 0;
    for (StreamId id = 0; id <= POOL; ++id)
      at = std::max(at, queue_of(device, id).sync());
    wait_until(at, "device");
  }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 0.0; }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& s) const override { use_on(data.get(), s); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// -- memory --------------------------------------------------------------------------------------------------

struct Block {
  void* data;
  size_t size;
  int device;
  StreamId stream;
  std::set<StreamId> others = {};  // streams that use it, too
};
std::mutex memory_mutex;
std::map<std::tuple<int, StreamId, size_t>, std::vector<void*>> freed;
std::unordered_map<void*, Block> blocks;
std::map<uintptr_t, size_t> locked;  // page-locked ranges of the host

void free_block(void* data) {
  Block block;
  {
    Lock lock(memory_mutex);
    block = blocks.at(data);
    blocks.erase(data);
  }
  // Who gets it next writes to it, in the order of this stream, and behind others that used it.
  auto& queue = queue_of(block.device, block.stream);
  for (auto other : block.others) {
    auto flag = std::make_shared<Flag>();
    queue_of(block.device, other).give_unreckoned([flag] { flag->set(); });
    queue.give_unreckoned([flag] { flag->wait(); });
  }
  queue.give_unreckoned([block] { memset(block.data, 0xA5, block.size); });
  Lock lock(memory_mutex);
  freed[{block.device, block.stream, block.size}].push_back(data);
}

void use_on(void* data, const Stream& s) {
  Lock lock(memory_mutex);
  auto found = blocks.find(data);
  if (found != blocks.end() && found->second.stream != s.id())
    found->second.others.insert(s.id());
}

struct LateAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    const int device = get_device();
    set_device(device);
    note_context(device);
    const Device place(kLate, static_cast<DeviceIndex>(device));
    if (!n)
      return {nullptr, nullptr, &free_block, place};
    const size_t size = (n + 511) / 512 * 512;
    const StreamId stream = current[device];
    Lock lock(memory_mutex);
    auto& some = freed[{device, stream, size}];
    void* data;
    if (some.empty()) {
      note_unsafe("allocation");
      data = aligned_alloc(512, size);
      memset(data, 0xA5, size);
    } else {
      data = some.back();
      some.pop_back();
    }
    blocks[data] = {data, size, device, stream};
    return {data, data, &free_block, place};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* dst, const void* src, size_t n) const override { memcpy(dst, src, n); }
} late_allocator;

int unlock(uintptr_t at) {
  Lock lock(memory_mutex);
  return locked.erase(at) ? 0 : 713;  // cudaErrorHostMemoryNotRegistered
}
void free_locked(void* data) {
  unlock(reinterpret_cast<uintptr_t>(data));
  free(data);
}
struct LockedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    if (!n)
      return {nullptr, nullptr, &free_locked, Device(c10::kCPU)};
    void* data = aligned_alloc(64, (n + 63) / 64 * 64);
    Lock lock(memory_mutex);
    locked[reinterpret_cast<uintptr_t>(data)] = n;
    return {data, data, &free_locked, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_locked; }
  void copy_data(void* dst, const void* src, size_t n) const override { memcpy(dst, src, n); }
} locked_allocator;

bool is_locked(const void* data) {
  Lock lock(memory_mutex);
  auto at = reinterpret_cast<uintptr_t>(data);
  auto found = locked.upper_bound(at);
  if (found == locked.begin())
    return false;
  --found;
  return at < found->first + found->second;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex d) const override {
    Lock lock(notes_mutex);
    return contexts.count(d) > 0;
  }
  DeviceIndex deviceCount() const override { return NUM_DEVICES; }
  void setCurrentDevice(DeviceIndex d) const override { set_device(d); }
  DeviceIndex getCurrentDevice() const override { return static_cast<DeviceIndex>(get_device()); }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { return static_cast<DeviceIndex>(exchange_device(d)); }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override {
    int before = get_device();
    maybe_set_device(d);
    return static_cast<DeviceIndex>(before);
  }
  bool isPinnedPtr(const void* data) const override { return is_locked(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &locked_allocator; }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override {
    static std::vector<at::Generator> all = [] {
      std::vector<at::Generator> made;
      for (int i = 0; i < NUM_DEVICES; ++i)
        made.push_back(at::detail::createCPUGenerator(i));
      return made;
    }();
    return all.at(d < 0 ? get_device() : d);
  }
  at::Generator getNewGenerator(DeviceIndex = -1) const override { return at::detail::createCPUGenerator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    On on(storage.device().index());
    auto data = late_allocator.allocate(size);
    if (impl->data() && data.get()) {
      auto *into = data.get(), *from = impl->mutable_data();
      auto n = std::min(size, impl->nbytes());
      current_queue(storage.device().index()).give(n / rates.memory, [=] { memcpy(into, from, n); });
    }
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(size);
  }
};

// -- kernels -------------------------------------------------------------------------------------------------

bool is_late(const at::Tensor& t) {
  return t.defined() && t.device().type() == kLate;
}

// A CPU tensor in the same memory; it owns nothing.
at::Tensor alias_of(const at::Tensor& t) {
  auto& storage = t.storage();
  c10::Storage mine(
      c10::Storage::use_byte_size_t(), storage.nbytes(),
      c10::DataPtr(const_cast<void*>(storage.data()), Device(c10::kCPU)), nullptr, false);
  auto found = at::detail::make_tensor<c10::TensorImpl>(
      std::move(mine), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  found.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.is_conj())
    found._set_conj(true);
  if (t.is_neg())
    found._set_neg(true);
  return found;
}

at::Tensor meta_of(const at::Tensor& t) {
  return at::empty_strided(t.sizes(), t.strides(), t.options().device(c10::kMeta).pinned_memory(false));
}

// A value with `each` of its tensors replaced.
template <class F>
c10::IValue mapped(const c10::IValue& v, F&& each) {
  if (v.isTensor())
    return v.toTensor().defined() ? c10::IValue(each(v.toTensor())) : v;
  if (v.isTensorList()) {
    c10::List<at::Tensor> some;
    for (const at::Tensor& t : v.toTensorVector())
      some.push_back(t.defined() ? each(t) : t);
    return some;
  }
  if (v.isList() && !v.toListRef().empty() && (v.toListRef()[0].isTensor() || v.toListRef()[0].isNone())) {
    c10::List<std::optional<at::Tensor>> some;
    for (const auto& one : v.toListRef())
      some.push_back(one.isTensor() ? std::optional<at::Tensor>(each(one.toTensor())) : std::nullopt);
    return some;
  }
  return v;
}
template <class F>
void for_tensors(const torch::jit::Stack& values, F&& each) {
  for (const auto& v : values)
    mapped(v, [&](const at::Tensor& t) { each(t); return t; });
}

void nap(int64_t us) {
  if (us > 0)
    std::this_thread::sleep_for(std::chrono::microseconds(us));
}

std::optional<int> device_in(const torch::jit::Stack& args) {
  std::optional<int> found;
  for_tensors(args, [&](const at::Tensor& t) {
    if (is_late(t) && !found)
      found = t.device().index();
  });
  for (const auto& v : args)
    if (!found && v.isDevice() && v.toDevice().type() == kLate)
      found = index_or_current(v.toDevice());
  return found;
}

// Seconds that a kernel would take: by the bytes that it touches, or the products that it makes.
double cost_of(const std::string& name, const torch::jit::Stack& args) {
  double bytes = 0, products = 1, summed = 0;
  int matrices = 0;
  for_tensors(args, [&](const at::Tensor& t) {
    bytes += t.nbytes();
    if (t.dim() < 2)
      return;
    if (!matrices++)
      summed = t.size(-1) * (t.dim() == 3 ? t.size(0) : 1);
    products *= t.numel();
  });
  if (matrices == 2 && name.find("mm") != std::string::npos)
    return 2 * products / summed / rates.flops;
  return bytes / rates.memory;
}

// A CPU result, on the device.
at::Tensor brought(const at::Tensor& t, int device) {
  if (!t.defined())
    return t;
  auto made = at::empty_strided(
      t.sizes(), t.strides(), t.options().device(Device(kLate, static_cast<DeviceIndex>(device))));
  auto into = alias_of(made);
  current_queue(device).give(0, [into, t]() mutable {
    at::AutoDispatchBelowAutograd guard;
    into.copy_(t);
  });
  return made;
}

bool is_written(const c10::Argument& a) {
  return a.alias_info() && a.alias_info()->isWrite();
}

// Results that have no memory yet (`out=`) get the shapes that meta kernels say.
void shape_results(const c10::OperatorHandle& op, const torch::jit::Stack& args) {
  const auto& declared = op.schema().arguments();
  auto is_open = [&](size_t i) {
    return is_written(declared[i]) && args[i].isTensor() && is_late(args[i].toTensor()) && !args[i].toTensor().numel();
  };
  bool any = false;
  for (size_t i = 0; i < args.size(); ++i)
    any |= is_open(i);
  if (!any)
    return;
  torch::jit::Stack meta;
  for (const auto& v : args)
    meta.push_back(mapped(v, meta_of));
  const auto shaped = meta;  // the tensors that the call writes to
  at::AutoDispatchBelowAutograd guard;
  op.callBoxed(&meta);
  for (size_t i = 0; i < args.size(); ++i)
    if (is_open(i) && !args[i].toTensor().sizes().equals(shaped[i].toTensor().sizes())) {
      const auto& made = shaped[i].toTensor();
      auto t = args[i].toTensor();
      t.resize_(made.sizes());
      t.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes(), made.strides());
    }
}

// A view: the same storage, no kernel.
void view_of(const c10::OperatorHandle& op, torch::jit::Stack* stack, torch::jit::Stack on_cpu, const at::Tensor& base) {
  at::AutoDispatchBelowAutograd guard;
  op.callBoxed(&on_cpu);
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (auto& r : on_cpu)
    stack->push_back(mapped(r, [&](const at::Tensor& t) {
      auto made = at::detail::make_tensor<c10::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), t.dtype());
      made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
      return made;
    }));
}

// What an operation returns, made before it runs, and aliases of what it has to fill.  False if only running
// it can tell.
bool plan_results(
    const c10::OperatorHandle& op, const torch::jit::Stack& args, int device, bool writes,
    torch::jit::Stack& returned, std::vector<at::Tensor>& results) {
  const auto& schema = op.schema();
  for (const auto& r : schema.returns())
    if (r.type()->kind() != c10::TypeKind::TensorType && r.type()->kind() != c10::TypeKind::ListType)
      return false;
  if (op.hasTag(at::Tag::nondeterministic_seeded))
    return false;
  if (writes) {  // what is written is what is returned
    std::vector<c10::IValue> written;
    for (size_t i = 0; i < args.size(); ++i)
      if (is_written(schema.arguments()[i]))
        written.push_back(args[i]);
    returned.insert(returned.end(), written.begin(), written.begin() + schema.returns().size());
    return true;
  }
  torch::jit::Stack meta;
  for (const auto& v : args)
    meta.push_back(v.isDevice() ? c10::IValue(Device(c10::kMeta)) : mapped(v, meta_of));
  try {
    at::AutoDispatchBelowAutograd guard;
    op.callBoxed(&meta);
  } catch (const std::exception&) {
    return false;  // no meta kernel, or a shape that depends on values
  }
  const Device place(kLate, static_cast<DeviceIndex>(device));
  for (auto& r : meta)
    returned.push_back(mapped(r, [&](const at::Tensor& t) {
      auto made = at::empty_strided(t.sizes(), t.strides(), t.options().device(place));
      results.push_back(alias_of(made));
      return made;
    }));
  return true;
}

// Do it now, behind all that the stream has been given.
void run_at_once(
    const c10::OperatorHandle& op, torch::jit::Stack* stack, const torch::jit::Stack& args,
    torch::jit::Stack on_cpu, int device) {
  const auto& schema = op.schema();
  wait_until(current_queue(device).sync(), "op " + schema.name());
  at::AutoDispatchBelowAutograd guard;
  op.callBoxed(&on_cpu);
  torch::jit::drop(*stack, args.size());
  std::vector<c10::IValue> written;
  for (size_t i = 0; i < args.size(); ++i)
    if (is_written(schema.arguments()[i]))
      written.push_back(args[i]);
  size_t next = 0;
  for (size_t i = 0; i < on_cpu.size(); ++i) {
    const auto& r = schema.returns()[i];
    const bool is_mine = r.alias_info() && r.alias_info()->isWrite() && next < written.size();
    stack->push_back(is_mine ? written[next++] : mapped(on_cpu[i], [&](const at::Tensor& t) { return brought(t, device); }));
  }
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const torch::jit::Stack args(stack->end() - schema.arguments().size(), stack->end());
  const auto found = device_in(args);
  TORCH_CHECK(found.has_value(), "late: ", schema.name(), " has no tensor of the device");
  const int device = *found;
  On on(device);
  bool writes = false, views = false;
  for (const auto& a : schema.arguments())
    writes |= is_written(a);
  for (const auto& r : schema.returns())
    views |= r.alias_info() && !r.alias_info()->isWrite();
  if (writes)
    shape_results(op, args);
  torch::jit::Stack on_cpu;
  for (const auto& v : args) {
    if (v.isDevice() && v.toDevice().type() == kLate)
      on_cpu.push_back(Device(c10::kCPU));
    else  // a tensor of the host is read when the kernel is given, not when it runs
      on_cpu.push_back(mapped(v, [](const at::Tensor& t) {
        return is_late(t) ? alias_of(t) : t.device().is_cpu() ? t.clone() : t;
      }));
  }
  if (views && !writes) {
    for (const auto& v : args)
      if (v.isTensor() && is_late(v.toTensor()))
        return view_of(op, stack, std::move(on_cpu), v.toTensor());
  }
  torch::jit::Stack returned;
  std::vector<at::Tensor> results;
  if (!plan_results(op, args, device, writes, returned, results))
    return run_at_once(op, stack, args, std::move(on_cpu), device);
  current_queue(device).give(cost_of(schema.name(), args), [op, on_cpu, results]() mutable {
    nap(kernel_us);
    at::AutoDispatchBelowAutograd guard;
    op.callBoxed(&on_cpu);
    size_t i = 0;
    for_tensors(on_cpu, [&](const at::Tensor& t) {
      if (i < results.size())
        results[i++].copy_(t);
    });
  });
  torch::jit::drop(*stack, args.size());
  stack->insert(stack->end(), returned.begin(), returned.end());
}

// -- copies --------------------------------------------------------------------------------------------------

void copy_slowly(void* into, const void* from, size_t n) {
  const int64_t rate = bytes_per_s;
  const size_t part = 1 << 16;
  for (size_t at = 0; at < n; at += part) {
    const size_t size = std::min(part, n - at);
    if (rate > 0)
      nap(static_cast<int64_t>(size) * 1000000 / rate);
    memcpy(static_cast<char*>(into) + at, static_cast<const char*>(from) + at, size);
  }
}

void copy_on_device(const at::Tensor& self, const at::Tensor& dst) {
  auto from = alias_of(self), into = alias_of(dst);
  auto& queue = current_queue(self.device().index());
  auto copy = [from, into]() mutable {
    nap(kernel_us);
    at::AutoDispatchBelowAutograd guard;
    into.copy_(from);
  };
  if (self.device() == dst.device()) {
    queue.give(2 * dst.nbytes() / rates.memory, copy);
    return;
  }
  auto& other = current_queue(dst.device().index());  // the current streams of both wait for each other
  queue.after(other.record());
  queue.give(dst.nbytes() / rates.locked, copy);
  other.after(queue.record());
}

// The times at which the links between the host and each device are free again: to it, from it.
std::mutex links_mutex;
double links_s[NUM_DEVICES][2] = {};

void copy_over_link(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  const bool from_late = is_late(self);
  const int device = (from_late ? self : dst).device().index();
  const size_t size = dst.nbytes();
  void* into = dst.data_ptr();
  const void* from = self.data_ptr();
  const void* host = from_late ? into : from;
  const bool is_fast = is_locked(host), waits_not = non_blocking && (is_fast || all_is_pinned);
  auto& queue = current_queue(device);
  {
    Lock lock(links_mutex);
    auto& link = links_s[device][from_late];
    link = queue.give(
        size / (is_fast ? rates.locked : rates.pageable), [=] { copy_slowly(into, from, size); }, link);
  }
  if (!waits_not)
    wait_until(queue.sync(), is_fast ? "copy" : "pageable copy");
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  if (self.is_same(dst) || !dst.numel())
    return dst;
  const bool from_late = is_late(self), to_late = is_late(dst);
  On on((from_late ? self : dst).device().index());
  const bool is_plain = self.dtype() == dst.dtype() && self.is_contiguous() && dst.is_contiguous() &&
      self.sizes().equals(dst.sizes()) && self.is_conj() == dst.is_conj() && self.is_neg() == dst.is_neg();
  if (from_late && to_late) {
    copy_on_device(self, dst);
  } else if (is_plain) {
    copy_over_link(self, dst, non_blocking);
  } else if (from_late) {  // as CUDA: what is no memcpy goes by way of a contiguous tensor
    auto made = self.expand_as(dst).to(dst.scalar_type()).contiguous();
    if (dst.is_contiguous())
      dst.copy_(made, non_blocking);
    else
      dst.copy_(at::empty(dst.sizes(), dst.options()).copy_(made));
  } else {
    auto made = self.expand_as(dst).contiguous();
    auto there = at::empty(dst.sizes(), made.options().device(dst.device()).pinned_memory(false));
    dst.copy_(there.copy_(made, non_blocking));
  }
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  if (!dst.sizes().equals(self.sizes()))
    const_cast<at::Tensor&>(dst).resize_(self.sizes());
  return copy_from(self, dst, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  wait_until(current_queue(self.device().index()).sync(), "item");
  return at::_local_scalar_dense(alias_of(self));
}

// -- tensors -------------------------------------------------------------------------------------------------

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  On on(index_or_current(device.value_or(Device(kLate))));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &late_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>, std::optional<Device> device, std::optional<bool>) {
  On on(index_or_current(device.value_or(Device(kLate))));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &late_allocator,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  std::optional<int64_t> at;
  if (offset)
    at = offset->guard_int(__FILE__, __LINE__);
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), at);
}
at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}
at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_to(at::Tensor& self, c10::Storage source, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t at) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, std::optional<int64_t>(at));
  return self;
}
at::Tensor& set_storage(at::Tensor& self, c10::Storage source) {
  const auto n = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_to(self, std::move(source), {n}, {1}, 0);
}
at::Tensor& set_storage_offset(
    at::Tensor& self, c10::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size).vec(), strides = C10_AS_INTARRAYREF_SLOW(stride).vec();
  if (strides.empty()) {  // contiguous
    strides.assign(sizes.size(), 1);
    for (auto i = static_cast<int64_t>(sizes.size()) - 2; i >= 0; --i)
      strides[i] = strides[i + 1] * sizes[i + 1];
  }
  return set_to(self, std::move(source), sizes, strides, offset.guard_int(__FILE__, __LINE__));
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_to(self, source.storage(), source.sizes(), source.strides(), source.storage_offset());
}
const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size).vec();
  const size_t need = (c10::multiply_integers(sizes) + self.storage_offset()) * self.dtype().itemsize();
  if (need > self.storage().nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), need);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage_offset);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("resize_", &resize);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::SetAllocator(kLate, &late_allocator);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  m.def("set_device", &set_device);
  m.def("get_device", &get_device);
  m.def("generator", [](int device) { return at::detail::getPrivateUse1Hooks().getDefaultGenerator(device); });
  m.def("kernel_us", [](int64_t us) { kernel_us = us; });
  m.def("bytes_per_s", [](int64_t n) { bytes_per_s = n; });
  m.def("all_is_pinned", [](bool is) { all_is_pinned = is; });
  m.def("streams_taken", [] { return streams_taken.load(); });
  m.def("begin_capture", [] { capturing = this_thread(); });
  m.def("end_capture", [] {  // what has voided it
    capturing = 0;
    Lock lock(notes_mutex);
    return std::exchange(voided_by, {});
  });
  m.def("host_register", [](uintptr_t at, size_t n) {
    note_unsafe("register");
    Lock lock(memory_mutex);
    locked[at] = n;
  });
  m.def("host_unregister", &unlock);
  m.def("is_locked", [](uintptr_t at) { return is_locked(reinterpret_cast<const void*>(at)); });
  m.def("work", [](double takes_s) { current_queue(get_device()).give(takes_s, [] {}); });
  m.def("sleep", [](double s) { current_queue(get_device()).give(s, [s] { nap(static_cast<int64_t>(s * 1e6)); }); });
  m.def("now_s", [] { return host_s; });
  m.def("go_to_s", [](double s) { host_s = std::max(host_s, s); });
  m.def("stream_s", [](int device, StreamId id) { return queue_of(device, id).at_s; });
  m.def("set_rates", [](double launch_s, double flops, double memory, double over_locked, double over_pageable) {
    rates = {launch_s, flops, memory, over_locked, over_pageable};
  });
  m.def("contexts", [] {
    Lock lock(notes_mutex);
    return contexts_by;
  });
  m.def("waits", [] {
    Lock lock(notes_mutex);
    std::vector<std::tuple<std::string, int64_t, double>> found;
    for (auto& w : waits)
      found.emplace_back(w.kind, w.thread, w.seconds);
    return found;
  });
  m.def("forget", [] {
    Lock lock(notes_mutex);
    waits.clear();
    contexts.clear();
    contexts_by.clear();
  });
}
