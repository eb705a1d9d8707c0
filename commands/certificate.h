// Prints what holds for a model, data and settings: streambp verify --certificate.
#pragma once

#include "commands/verify_input.h"
#include "referee/certificate.h"

namespace streambp {

// quick: without lines that take minutes for a large model; full; or the name of a line
std::vector<std::string> certificate_choices();

// Completes the subject with what the input says about files. Returns whether no line fails.
bool print_certificate(const std::string& which, const VerifyInput& input, Certificate::Subject subject, Json& json);

}  // namespace streambp
