#include "half_types.h"
