// One list for each struct that Python mirrors: it declares the struct, and it describes it to Python.
//
// library.py builds the same description from its ctypes structures and compares the two when it loads the library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

namespace llama {

template <class T>
constexpr const char* type_name() {
    if constexpr (std::is_pointer_v<T>) return "pointer";
    if constexpr (std::is_same_v<T, int32_t>) return "int32";
    if constexpr (std::is_same_v<T, int64_t>) return "int64";
    if constexpr (std::is_same_v<T, float>) return "float32";
}

// A struct's fields are a macro LLAMA_<NAME>(field), which calls field(type, name) for each.
#define LLAMA_DECLARE_FIELD(type, name) type name;
#define LLAMA_DESCRIBE_FIELD(type, name) \
    text += std::string(" ") + #name + ":" + type_name<type>() + "@" + std::to_string(offsetof(Struct, name));
#define LLAMA_DEFINE_STRUCT(Name, FIELDS)                              \
    struct Name {                                                      \
        FIELDS(LLAMA_DECLARE_FIELD)                                    \
    };                                                                 \
    inline std::string describe_##Name() {                             \
        using Struct = Name;                                           \
        std::string text = #Name " " + std::to_string(sizeof(Struct)); \
        FIELDS(LLAMA_DESCRIBE_FIELD)                                   \
        return text;                                                   \
    }

// An enum with a text for each value is a macro that calls entry(enumerator, text) for each.
#define LLAMA_ENUMERATOR(name, text) name,
#define LLAMA_WORD(name, text) " " text

}  // namespace llama
