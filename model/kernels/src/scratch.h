// Scratch memory of one thread, aligned to pages. Grows as needed and is kept for later steps.
#pragma once

#include <cstddef>
#include <cstdio>
#include <cstdlib>

namespace kvasir {

struct Scratch {
    char* memory = nullptr;
    size_t size = 0;

    // Ends the process if the system has no more memory: the service replaces a worker that ends.
    char* reserve(size_t wanted) {
        if (wanted > size) {
            std::free(memory);
            size = (wanted + 4095) / 4096 * 4096;
            memory = static_cast<char*>(std::aligned_alloc(4096, size));
            if (memory == nullptr) {
                std::fprintf(stderr, "kvasir: out of memory: a kernel needs %zu bytes of scratch memory\n", size);
                std::abort();
            }
        }
        return memory;
    }
};

}  // namespace kvasir
