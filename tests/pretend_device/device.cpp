// A GPU on the CPU, for tests: PyTorch's PrivateUse1 device with CUDA's rules and a count of what
// the host and the device exchange. Memory is ordinary memory; every operation runs the CPU's
// kernel on aliases of its arguments, after the checks that CUDA makes. See __init__.py.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

using c10::DeviceType;
using c10::IValue;

const c10::Device kDevice(DeviceType::PrivateUse1, 0);

// ---------------------------------------------------------------- events

enum Event { kLaunch, kWait, kToDevice, kToHost, kEvents };
std::atomic<int64_t> counts[kEvents];
std::atomic<bool> forbidden{false};  // as during the capture of a CUDA graph
void (*listener)(int, const char*) = nullptr;

void happened(Event event, const std::string& what) {
  counts[event]++;
  if (listener != nullptr) listener(event, what.c_str());
  TORCH_CHECK(event != kWait || !forbidden, "operation not permitted when stream is capturing: ", what);
}

// ---------------------------------------------------------------- memory

std::mutex pinned_lock;
std::set<void*> pinned;

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* held = new c10::DataPtr(c10::GetAllocator(DeviceType::CPU)->allocate(bytes));
    return {held->get(), held, [](void* p) { delete static_cast<c10::DataPtr*>(p); }, kDevice};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
} device_allocator;

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* held = new c10::DataPtr(c10::GetAllocator(DeviceType::CPU)->allocate(bytes));
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned.insert(held->get());
    return {held->get(), held, &release, c10::Device(DeviceType::CPU)};
  }
  static void release(void* p) {
    auto* held = static_cast<c10::DataPtr*>(p);
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned.erase(held->get());
    delete held;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
} pinned_allocator;

bool here(const at::Tensor& t) { return t.defined() && t.device().type() == DeviceType::PrivateUse1; }

at::Tensor tensor_on(DeviceType type, c10::Storage storage, const at::Tensor& like) {
  auto key = type == DeviceType::CPU ? c10::DispatchKey::CPU : c10::DispatchKey::PrivateUse1;
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}

// A CPU tensor over the memory of `t`, for the time of one call.
at::Tensor on_cpu(const at::Tensor& t) {
  if (!here(t)) return t;
  const auto& storage = t.storage();
  c10::Storage shared(c10::Storage::use_byte_size_t(), storage.nbytes(),
                    c10::DataPtr(storage.mutable_data(), c10::Device(DeviceType::CPU)),
                    c10::GetAllocator(DeviceType::CPU), true);
  return tensor_on(DeviceType::CPU, std::move(shared), t);
}

c10::DataPtr keep(const c10::Storage& storage) {
  auto* held = new c10::Storage(storage);
  return {storage.mutable_data(), held, [](void* p) { delete static_cast<c10::Storage*>(p); }, kDevice};
}

using Pairs = std::vector<std::pair<at::Tensor, at::Tensor>>;  // a device tensor and its alias

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.storage().nbytes() > 0 && a.storage().data() == b.storage().data();
}

// The device tensor of a result: a view of an argument, or new memory.
at::Tensor on_device(const at::Tensor& result, const Pairs& pairs, bool* is_view) {
  if (!result.defined() || here(result)) return result;
  for (const auto& [original, cpu] : pairs) {
    if (same_memory(result, cpu)) {
      *is_view = true;
      return tensor_on(DeviceType::PrivateUse1, original.storage(), result);
    }
  }
  c10::Storage storage(c10::Storage::use_byte_size_t(), result.storage().nbytes(), keep(result.storage()),
                       &device_allocator, true);
  return tensor_on(DeviceType::PrivateUse1, std::move(storage), result);
}

// After an operation that may have resized an argument (`resize_`, `out=`).
void follow(const at::Tensor& original, const at::Tensor& over) {
  if (over.storage().data() != original.storage().data() || over.storage().nbytes() != original.storage().nbytes()) {
    auto* storage = original.storage().unsafeGetStorageImpl();
    storage->set_data_ptr_noswap(keep(over.storage()));
    storage->set_nbytes(over.storage().nbytes());
  }
  auto* impl = original.unsafeGetTensorImpl();
  if (over.sizes() != original.sizes() || over.strides() != original.strides())
    impl->set_sizes_and_strides(over.sizes(), over.strides(), over.storage_offset());
}

// ---------------------------------------------------------------- random numbers

struct DeviceGenerator final : c10::GeneratorImpl {
  at::Generator inner;
  explicit DeviceGenerator(at::Generator inner)
      : c10::GeneratorImpl(kDevice, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), inner(std::move(inner)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  // One byte longer than a CPU generator's: neither state fits the other, as with CUDA.
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return at::cat({inner.get_state(), at::zeros({1}, at::kByte)}).getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    auto given = at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(const_cast<c10::TensorImpl*>(&state)));
    TORCH_CHECK(given.is_cpu() && given.scalar_type() == at::kByte, "RNG state must be a torch.ByteTensor");
    TORCH_CHECK(given.numel() == inner.get_state().numel() + 1, "RNG state is wrong size");
    inner.set_state(given.slice(0, 0, given.numel() - 1).clone());
  }
  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(inner.clone()); }
  static DeviceType device_type() { return DeviceType::PrivateUse1; }
};

const at::Generator& default_generator() {
  static at::Generator made = at::make_generator<DeviceGenerator>(at::detail::createCPUGenerator());
  return made;
}

at::Generator inner_of(const at::Generator& given) {
  TORCH_CHECK(given.device().type() == DeviceType::PrivateUse1, "Expected a 'pretend' device type for generator but found '",
              given.device().type(), "'");
  return static_cast<DeviceGenerator*>(given.unsafeGetGeneratorImpl())->inner;
}

// ---------------------------------------------------------------- CUDA's rules

bool among(const std::set<std::string>& names, const std::string& name) { return names.count(name) > 0; }

// The host has to wait for the size or the value of the result.
const std::set<std::string> kWaits = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::_unique",
    "aten::unique_dim", "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::equal",
    "aten::multinomial", "aten::bincount", "aten::histc", "aten::normal",
};
// Operations that take no CPU scalar (a tensor of 0 dimensions) beside device tensors.
const std::set<std::string> kStrict = {
    "aten::index_select", "aten::index_copy", "aten::index_copy_", "aten::index_add", "aten::index_add_",
    "aten::gather", "aten::scatter", "aten::scatter_", "aten::scatter_add", "aten::scatter_add_", "aten::embedding",
    "aten::take", "aten::bucketize", "aten::searchsorted",
};
const std::set<std::string> kIndexing = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"};
// Whether a launch belongs to it; views are recognised by their result.
const std::set<std::string> kNoLaunch = {
    "aten::empty", "aten::empty_strided", "aten::resize_", "aten::set_", "aten::_local_scalar_dense",
};

std::vector<at::Tensor> tensors_of(const IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  std::vector<at::Tensor> found;
  if (value.isTensorList()) return value.toTensorVector();
  if (value.isList())
    for (const IValue& each : value.toListRef())
      if (each.isTensor()) found.push_back(each.toTensor());
  return found;
}

void refuse(const std::string& name, const at::Tensor& t) {
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, pretend:0 and ",
              t.device(), "! (", name, ")");
}

void check_indexing(const std::string& name, c10::ArrayRef<IValue> args) {
  const auto self = args[0].toTensor();
  bool waits = false;
  for (const auto& index : tensors_of(args[1])) {
    if (!index.defined()) continue;
    TORCH_CHECK(here(self) || !here(index),
                "indices should be either on cpu or on the same device as the indexed tensor (", self.device(), ")");
    waits |= index.scalar_type() == at::kBool || index.scalar_type() == at::kByte || !here(index);
  }
  if (args.size() > 2 && args[2].isTensor() && args[2].toTensor().dim() > 0 && !here(args[2].toTensor()))
    refuse(name, args[2].toTensor());
  if (waits && name != "aten::index") happened(kWait, name);  // `index` calls nonzero or copies itself
}

void check_devices(const std::string& name, c10::ArrayRef<IValue> args) {
  if (among(kIndexing, name)) return check_indexing(name, args);
  for (const IValue& arg : args)
    for (const auto& t : tensors_of(arg)) {
      if (!t.defined() || here(t)) continue;
      if (t.dim() > 0 || !arg.isTensor() || among(kStrict, name)) refuse(name, t);
    }
}

bool waits(const std::string& name, const c10::FunctionSchema& schema, c10::ArrayRef<IValue> args) {
  if (name == "aten::repeat_interleave") return args.size() < 2 || args.back().isNone();
  if (name == "aten::normal")
    return schema.arguments().size() > 1 && std::any_of(args.begin(), args.end(), [](const IValue& v) { return v.isTensor(); });
  return among(kWaits, name);
}

// ---------------------------------------------------------------- every operation

IValue aliased(const IValue& value, Pairs& pairs) {
  auto one = [&pairs](const at::Tensor& t) {
    if (!here(t)) return t;
    pairs.emplace_back(t, on_cpu(t));
    return pairs.back().second;
  };
  if (value.isTensor()) return one(value.toTensor());
  if (value.isDevice()) return c10::Device(DeviceType::CPU);
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const auto& t : value.toTensorVector()) list.push_back(one(t));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const IValue& each : value.toListRef())
      list.push_back(each.isTensor() ? std::optional<at::Tensor>(one(each.toTensor())) : std::nullopt);
    return list;
  }
  return value;
}

IValue returned(const IValue& value, const Pairs& pairs, bool* is_view) {
  if (value.isTensor()) return on_device(value.toTensor(), pairs, is_view);
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const auto& t : value.toTensorVector()) list.push_back(on_device(t, pairs, is_view));
    return list;
  }
  return value;
}

// Where an operation takes a generator, by its schema (a schema's types are slow to read).
const std::vector<size_t>& generators_of(const c10::FunctionSchema& schema) {
  static std::mutex lock;
  static std::unordered_map<const c10::FunctionSchema*, std::vector<size_t>> known;
  std::lock_guard<std::mutex> guard(lock);
  auto [at, fresh] = known.try_emplace(&schema);
  for (size_t i = 0; fresh && i < schema.arguments().size(); i++)
    if (schema.arguments()[i].type()->str().find("Generator") != std::string::npos) at->second.push_back(i);
  return at->second;
}

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  const size_t n = schema.arguments().size();
  const std::vector<IValue> given(stack->end() - n, stack->end());
  check_devices(name, given);
  if (waits(name, schema, given)) happened(kWait, name);
  Pairs pairs;
  for (size_t i = 0; i < n; i++) {
    auto& slot = (*stack)[stack->size() - n + i];
    slot = aliased(given[i], pairs);
  }
  for (size_t i : generators_of(schema))
    (*stack)[stack->size() - n + i] = inner_of(given[i].isNone() ? default_generator() : given[i].toGenerator());
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  if (schema.is_mutable())
    for (const auto& [original, cpu] : pairs) follow(original, cpu);
  bool is_view = false;
  const size_t m = schema.returns().size();
  for (size_t i = 0; i < m; i++) {
    auto& slot = (*stack)[stack->size() - m + i];
    const auto* to = schema.returns()[i].alias_info();
    bool argument = false;
    if (to != nullptr && to->isWrite())  // the argument itself is returned
      for (size_t k = 0; k < n && !argument; k++) {
        const auto* from = schema.arguments()[k].alias_info();
        argument = from != nullptr && from->isWrite() && from->beforeSets() == to->beforeSets();
        if (argument) slot = given[k];
      }
    if (!argument) slot = returned(slot, pairs, &is_view);
  }
  if (!is_view && !among(kNoLaunch, name)) happened(kLaunch, name);
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  if (self.numel() == 0) return to;
  if (here(self) && here(to)) {
    happened(kLaunch, "aten::copy_");
  } else {
    happened(here(to) ? kToDevice : kToHost, "aten::copy_");
    if (!non_blocking) happened(kWait, here(to) ? "copy to the device" : "copy to the host");
  }
  on_cpu(to).copy_(on_cpu(self));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

// PyTorch knows no default convolution for a new device.
at::Tensor wrapped(const at::Tensor& result) {
  bool is_view = false;
  happened(kLaunch, "aten::convolution");
  return on_device(result, {}, &is_view);
}

using Ints = c10::SymIntArrayRef;

at::Tensor convolution(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& b, Ints stride,
                       Ints padding, Ints dilation, bool transposed, Ints output_padding, c10::SymInt groups) {
  if (!here(w)) refuse("aten::convolution", w);
  auto bias = b.has_value() ? std::optional<at::Tensor>(on_cpu(*b)) : std::nullopt;
  return wrapped(at::convolution_symint(on_cpu(x), on_cpu(w), bias, stride, padding, dilation, transposed,
                                        output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& x, const at::Tensor& w, Ints stride, Ints padding, Ints dilation,
    bool transposed, Ints output_padding, c10::SymInt groups, std::array<bool, 3> mask) {
  c10::SymInt channels = transposed ? w.sym_size(1) * groups : w.sym_size(0);
  auto [gx, gw, gb] = at::convolution_backward_symint(on_cpu(grad), on_cpu(x), on_cpu(w), c10::SymIntArrayRef(&channels, 1),
                                                      stride, padding, dilation, transposed, output_padding, groups, mask);
  return {wrapped(gx), wrapped(gw), wrapped(gb)};
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data() != nullptr && stride.size() == size.size()) {
    impl->set_sizes_and_strides(size, stride, offset);
  } else {
    impl->set_sizes_contiguous(size);
  }
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const int64_t n = source.nbytes() / self.dtype().itemsize();
  return set_storage(self, std::move(source), 0, {n}, {});
}

bool may_share(const at::Tensor&, const at::Tensor&) { return true; }  // `module.to(device)` keeps its Parameters

// ---------------------------------------------------------------- what PyTorch asks of a device

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<DeviceGenerator>(at::detail::createCPUGenerator());
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> guard(pinned_lock);
    return pinned.count(const_cast<void*>(data)) > 0;
  }
  at::Device getDeviceFromPtr(void*) const override { return kDevice; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto made = device_allocator.allocate(bytes);
    memcpy(made.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(made));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
} hooks;

// One stream on which everything has ended when the call returns.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::PrivateUse1> {
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return getStream(kDevice); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeDevice(const c10::DeviceIndex) const override { happened(kWait, "synchronize"); }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
REGISTER_ALLOCATOR(DeviceType::PrivateUse1, &device_allocator);

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("_has_compatible_shallow_copy_type", &may_share);
}

TORCH_LIBRARY(pretend, m) {
  m.def("rng_state() -> Tensor", [] { return default_generator().get_state(); });
  m.def("set_rng_state(Tensor state) -> ()", [](const at::Tensor& state) { 
    auto generator = default_generator();
    generator.set_state(state);
  });
  m.def("manual_seed(int seed) -> ()", [](int64_t seed) {
    auto generator = default_generator();
    generator.set_current_seed(static_cast<uint64_t>(seed));
  });
}

extern "C" {
void pretend_counts(int64_t* out) {
  for (int i = 0; i < kEvents; i++) out[i] = counts[i];
}
void pretend_forbid_waits(int on) { forbidden = on != 0; }
void pretend_listen(void (*to)(int, const char*)) { listener = to; }
}
