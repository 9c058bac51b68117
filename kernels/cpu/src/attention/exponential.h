// exp for arguments that are not far above 0, for any Lanes (see vector_kernel.h).
#pragma once

namespace sglang_hybrid {
namespace {

// Return exp(x) with a relative error of about 1e-7. The result is exactly 1 at 0, and 0 for x below -87 (where it would be
// denormal), for -inf and for NaN.
template <class Lanes>
inline typename Lanes::Vector exponential(typename Lanes::Vector x) {
    using Vector = typename Lanes::Vector;
    const auto constant = [](float value) { return Lanes::broadcast(value); };

    const Vector power = Lanes::round(Lanes::mul(x, constant(1.44269504f)));
    // ln 2 in two parts: the first has 9 significant bits, so its products with `power` are exact even without FMA
    Vector rest = Lanes::fma(power, constant(-0.693359375f), x);
    rest = Lanes::fma(power, constant(2.12194440e-4f), rest);

    // minimax polynomial over +-ln(2)/2 with the first two coefficients held at 1: relative error 4e-9
    Vector value = constant(0.0013814467238262296f);
    value = Lanes::fma(value, rest, constant(0.008368780836462975f));
    value = Lanes::fma(value, rest, constant(0.04166839271783829f));
    value = Lanes::fma(value, rest, constant(0.1666651964187622f));
    value = Lanes::fma(value, rest, constant(0.4999999403953552f));
    value = Lanes::fma(value, rest, constant(1.0f));
    value = Lanes::fma(value, rest, constant(1.0f));
    return Lanes::scaled_where_at_least(value, power, x, -87.0f);
}

}  // namespace
}  // namespace sglang_hybrid
