// Types of quantized matrices in strips.
#pragma once

#include "grouped.h"
#include "int4.h"
#include "int6.h"

namespace kvasir {

// Calls work with an object of the matrix type that stores these numbers.
template <typename Work>
void with_strips(Numbers numbers, const Work& work) {
    switch (numbers) {
        case Numbers::int4: return work(Int4<false>{});
        case Numbers::int4_offset: return work(Int4<true>{});
        case Numbers::int6: return work(Int6<false>{});
        case Numbers::int6_offset: return work(Int6<true>{});
        case Numbers::grouped8: return work(Grouped<false>{});
        default: return work(Grouped<true>{});
    }
}

}  // namespace kvasir
