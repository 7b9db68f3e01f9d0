// A pretend accelerator: torch's PrivateUse1 over the memory of the CPU.
//
// Every op runs the CPU's kernel on the same memory, after a check that all its tensors are on the device. It has a random
// state of its own, and counts how often the host would have to wait for it.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>

namespace {

constexpr auto KIND = c10::DeviceType::PrivateUse1;
const c10::Device DEVICE(KIND, 0);
std::atomic<int64_t> waits{0}, kernels{0};

// Memory of the CPU that says it is the device's, and the other way round: each keeps the other alive.
c10::Storage shared(const c10::Storage& storage, c10::Device device) {
  auto drop = [](void* kept) { delete static_cast<c10::Storage*>(kept); };
  c10::DataPtr data(storage.mutable_data(), new c10::Storage(storage), drop, device);
  return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetAllocator(device.type()), true);
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto own = c10::GetCPUAllocator()->allocate(bytes);
    auto* data = own.get();
    auto drop = [](void* kept) { delete static_cast<c10::DataPtr*>(kept); };
    return {data, new c10::DataPtr(std::move(own)), drop, DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
Memory memory;
REGISTER_ALLOCATOR(KIND, &memory);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void synchronizeDevice(c10::DeviceIndex) const override { ++waits; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Draws what the CPU would from the same seed, from a state of its own.
struct Chance final : c10::GeneratorImpl {
  explicit Chance(at::Generator cpu) : GeneratorImpl(DEVICE, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), cpu(std::move(cpu)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { cpu.set_offset(offset); }
  uint64_t get_offset() const override { return cpu.get_offset(); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  Chance* clone_impl() const override { return new Chance(cpu.clone()); }
  at::Generator cpu;
};

const at::Generator& device_chance() {
  static at::Generator one = at::make_generator<Chance>(at::detail::createCPUGenerator());
  return one;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return device_chance(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<Chance>(at::detail::createCPUGenerator());
  }
};

at::Tensor like(const at::Tensor& tensor, c10::Storage storage, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

at::Tensor bare(const at::Tensor& tensor) {
  return tensor.is_privateuseone() ? like(tensor, shared(tensor.storage(), at::kCPU), c10::DispatchKey::CPU) : tensor;
}

// One call of an op: its tensors as the CPU's, the kernel, and what it made as the device's.
struct Call {
  c10::OperatorHandle op;
  torch::jit::Stack* stack;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;  // of the device, of the CPU
  bool strangers = false;                                // tensors of the CPU that are more than a number

  at::Tensor on_cpu(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_privateuseone()) {
      strangers |= tensor.dim() > 0 || !tensor.is_cpu();
      return tensor;
    }
    for (auto& [ours, theirs] : pairs)
      if (ours.is_same(tensor)) return theirs;
    pairs.emplace_back(tensor, bare(tensor));
    return pairs.back().second;
  }

  at::Tensor on_device(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    c10::Storage storage;
    for (auto& [ours, theirs] : pairs) {
      if (theirs.is_same(tensor)) return ours;
      if (theirs.storage().data() == tensor.storage().data() && tensor.storage().data()) storage = ours.storage();
    }
    if (!storage) storage = shared(tensor.storage(), DEVICE);
    return like(tensor, std::move(storage), c10::DispatchKey::PrivateUse1);
  }

  template <typename Change>
  c10::IValue each(const c10::IValue& value, Change change) {
    if (value.isTensor()) return change(value.toTensor());
    if (value.isTensorList()) {
      std::vector<at::Tensor> all;
      for (const at::Tensor& one : value.toTensorList()) all.push_back(change(one));
      return all;
    }
    if (value.isList() && value.toList().elementType()->isSubtypeOf(*c10::OptionalType::ofTensor())) {
      c10::List<std::optional<at::Tensor>> all;
      for (const auto& one : value.toList()) {
        c10::IValue held = one;
        all.push_back(held.isNone() ? std::optional<at::Tensor>() : change(held.toTensor()));
      }
      return all;
    }
    return value;
  }

  void resized() {
    for (auto& [ours, theirs] : pairs) {
      if (ours.storage().data() != theirs.storage().data() || ours.storage().nbytes() != theirs.storage().nbytes()) {
        auto fresh = shared(theirs.storage(), DEVICE);
        auto* held = ours.storage().unsafeGetStorageImpl();
        held->set_data_ptr(std::move(fresh.unsafeGetStorageImpl()->mutable_data_ptr()));
        held->set_nbytes(theirs.storage().nbytes());
      }
      if (ours.sizes() != theirs.sizes() || ours.strides() != theirs.strides() || ours.storage_offset() != theirs.storage_offset())
        ours.unsafeGetTensorImpl()->set_sizes_and_strides(theirs.sizes(), theirs.strides(), theirs.storage_offset());
    }
  }

  void run() {
    const auto& schema = op.schema();
    const auto base = stack->size() - schema.arguments().size();
    std::vector<at::Generator> given;
    for (auto at = base; at < stack->size(); ++at) {
      auto& value = (*stack)[at];
      if (value.isDevice() && value.toDevice().type() == KIND) {
        value = c10::Device(at::kCPU);
      } else if (value.isGenerator()) {
        auto chance = value.toGenerator();
        TORCH_CHECK(chance.device().type() == KIND, schema.name(), ": a generator of the CPU for a tensor of the pretend device");
        value = static_cast<Chance*>(chance.unsafeGetGeneratorImpl())->cpu;
      } else {
        value = each(value, [&](const at::Tensor& tensor) { return on_cpu(tensor); });
      }
    }
    TORCH_CHECK(!strangers, schema.name(), ": expected all tensors to be on the pretend device, found one on the CPU");
    const bool indexes = schema.name().rfind("aten::index", 0) == 0;  // with a mask, torch asks for `nonzero` first
    if (op.hasTag(at::Tag::data_dependent_output) || (op.hasTag(at::Tag::dynamic_output_shape) && !indexes)) ++waits;
    ++kernels;
    const bool random = op.hasTag(at::Tag::nondeterministic_seeded);
    auto cpu = at::detail::getDefaultCPUGenerator();
    auto* own = static_cast<Chance*>(device_chance().unsafeGetGeneratorImpl())->cpu.unsafeGetGeneratorImpl();
    c10::intrusive_ptr<c10::TensorImpl> before;
    if (random) {
      before = cpu.unsafeGetGeneratorImpl()->get_state();
      cpu.unsafeGetGeneratorImpl()->set_state(*own->get_state());
    }
    auto restore = [&] {
      if (!random) return;
      own->set_state(*cpu.unsafeGetGeneratorImpl()->get_state());
      cpu.unsafeGetGeneratorImpl()->set_state(*before);
    };
    try {
      at::AutoDispatchBelowADInplaceOrView below;
      op.callBoxed(stack);
    } catch (...) {
      restore();
      throw;
    }
    restore();
    resized();
    const auto results = stack->size() - schema.returns().size();
    for (auto at = results; at < stack->size(); ++at)
      (*stack)[at] = each((*stack)[at], [&](const at::Tensor& tensor) { return on_device(tensor); });
  }
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call{op, stack}.run(); }


// The only way between the device and the CPU. The host waits for what it reads.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  if (!to.is_privateuseone()) ++waits;
  ++kernels;
  at::AutoDispatchBelowADInplaceOrView below;
  bare(to).copy_(bare(from));
  return to;
}

at::Scalar item(const at::Tensor& tensor) {
  ++waits;
  return at::_local_scalar_dense(bare(tensor));
}

at::Tensor& set(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

at::Tensor& set_whole(at::Tensor& self, at::Storage source) {
  const auto size = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set(self, std::move(source), 0, {size}, {1});
}

at::Tensor& set_like(at::Tensor& self, const at::Tensor& source) {
  return set(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

// Torch has names of its own for convolutions on a device that it does not know.
void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  Call{c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", ""), stack}.run();
}

void convolution_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto after_weight = stack->end() - 7;
  const auto weight = (after_weight - 1)->toTensor();
  const auto transposed = (after_weight + 3)->toBool();
  const auto bias = transposed ? weight.size(1) * (after_weight + 5)->toInt() : weight.size(0);
  stack->insert(after_weight, c10::IValue(std::vector<int64_t>{bias}));
  Call{c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", ""), stack}.run();
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", &copy_from);
  m.impl("_local_scalar_dense", &item);
  m.impl("set_.source_Storage_storage_offset", &set);
  m.impl("set_.source_Storage", &set_whole);
  m.impl("set_.source_Tensor", &set_like);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

TORCH_LIBRARY(pretend, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.def("random_state() -> Tensor", [] { return device_chance().get_state(); });
  m.def("set_random_state(Tensor state) -> ()", [](const at::Tensor& state) {
    device_chance().unsafeGetGeneratorImpl()->set_state(*state.unsafeGetTensorImpl());
  });
}

}  // namespace

extern "C" int64_t pretend_waits() { return waits; }
extern "C" int64_t pretend_kernels() { return kernels; }
