// Reads what real NVRTC output says about its kernels: names, parameter sizes, launch bounds,
// static shared memory and the architecture. The code itself is never run.
#include <elf.h>

#include <cstdlib>
#include <cstring>

#include "cuda_core.h"

namespace emu {
namespace {

constexpr uint16_t machine_cuda = 190;

// The attributes in a .nv.info.NAME section (their names are those that cuobjdump prints).
enum InfoAttribute : uint8_t { EIATTR_MAX_THREADS = 0x05, EIATTR_KPARAM_INFO = 0x17 };
constexpr uint8_t info_sized = 0x04;  // the format with a size and that many bytes

template <class T>
T load(const char* at) {
    T value;
    memcpy(&value, at, sizeof value);
    return value;
}

void parse_info(const char* at, const char* end, ImageKernel& kernel) {
    std::map<uint16_t, std::pair<size_t, size_t>> params;  // ordinal -> offset, size
    while (at + 4 <= end) {
        auto format = load<uint8_t>(at);
        auto attribute = load<uint8_t>(at + 1);
        auto value = load<uint16_t>(at + 2);
        at += 4;
        if (format != info_sized) continue;
        if (at + value > end) return;
        if (attribute == EIATTR_KPARAM_INFO && value >= 12) {
            // index, ordinal (16 bits), offset (16 bits), then flags with the size from bit 18 on
            params[load<uint16_t>(at + 4)] = {load<uint16_t>(at + 6), load<uint32_t>(at + 8) >> 18};
        } else if (attribute == EIATTR_MAX_THREADS && value >= 12) {
            kernel.max_threads =
                load<uint32_t>(at) * load<uint32_t>(at + 4) * load<uint32_t>(at + 8);
        }
        at += value;
    }
    for (const auto& param : params) {
        kernel.offsets.push_back(param.second.first);
        kernel.sizes.push_back(param.second.second);
    }
}

bool parse_cubin(const char* data, Image& image) {
    auto header = load<Elf64_Ehdr>(data);
    if (memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_machine != machine_cuda)
        return false;
    // Up to sm_90 the ABI is version 7, with the architecture in the low byte of the flags; from
    // sm_100 on it is 8, with the architecture in the next byte.
    unsigned flags = header.e_flags;
    image.architecture = header.e_ident[EI_ABIVERSION] < 8 ? flags & 0xff : flags >> 8 & 0xff;
    auto section = [&](int i) {
        return load<Elf64_Shdr>(data + header.e_shoff + i * sizeof(Elf64_Shdr));
    };
    const char* names = data + section(header.e_shstrndx).sh_offset;
    auto suffix_after = [](const char* name, const char* prefix) -> const char* {
        size_t length = strlen(prefix);
        return strncmp(name, prefix, length) ? nullptr : name + length;
    };
    for (int i = 0; i < header.e_shnum; i++) {
        Elf64_Shdr entry = section(i);
        const char* name = names + entry.sh_name;
        const char* at = data + entry.sh_offset;
        if (const char* described = suffix_after(name, ".nv.info."))
            parse_info(at, at + entry.sh_size, image.kernels[described]);
        if (const char* sharing = suffix_after(name, ".nv.shared."))
            image.kernels[sharing].static_shared = entry.sh_size;
        if (const char* code = suffix_after(name, ".text.")) image.kernels[code];
    }
    // Device functions that were not inlined have sections too, but no constant bank of their own.
    for (auto it = image.kernels.begin(); it != image.kernels.end();) {
        bool found = false;
        for (int i = 0; i < header.e_shnum && !found; i++)
            found = names + section(i).sh_name == ".nv.constant0." + it->first;
        it = found ? std::next(it) : image.kernels.erase(it);
    }
    return true;
}

size_t ptx_param_size(const char* declaration) {  // after ".param "
    size_t align = 0;
    if (sscanf(declaration, ".align %zu .b8", &align) == 1) {
        const char* bracket = strchr(declaration, '[');
        return bracket ? strtoul(bracket + 1, nullptr, 10) : 0;
    }
    char type = 0;
    size_t bits = 0;
    return sscanf(declaration, ".%c%zu", &type, &bits) == 2 ? bits / 8 : 0;
}

bool parse_ptx(const char* text, Image& image) {
    if (!strstr(text, ".version")) return false;
    for (const char* at = text; (at = strstr(at, ".entry "));) {
        at += strlen(".entry ");
        const char* end = strpbrk(at, "(\n\r {");
        const char* close = end ? strchr(end, ')') : nullptr;
        if (!close) return false;
        ImageKernel& kernel = image.kernels[std::string(at, end)];
        for (const char* p = end; (p = strstr(p, ".param ")) && p < close;) {
            p += strlen(".param ");
            kernel.sizes.push_back(ptx_param_size(p));
        }
        at = close;
    }
    return true;
}

}  // namespace

bool parse_image(const void* data, Image& image) {
    auto* bytes = static_cast<const char*>(data);
    if (memcmp(bytes, ELFMAG, SELFMAG) == 0) return parse_cubin(bytes, image);
    return parse_ptx(bytes, image);
}

}  // namespace emu
