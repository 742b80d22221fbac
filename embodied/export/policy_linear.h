/* a test of bits: compilers may take isfinite for true (-ffinite-math-only, -Ofast) */
static inline bool policy_finite(const float *v, int n)
{
    for (int i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &v[i], sizeof bits);
        if ((bits & 0x7f800000u) == 0x7f800000u) return false;
    }
    return true;
}

/* y = W x + b, W row by row */
static inline void policy_linear(const float *x, int inputs, const float *w, const float *b,
                                 float *y, int outputs)
{
    for (int i = 0; i < outputs; i++) {
        float sum = b[i];
        for (int j = 0; j < inputs; j++) sum += w[i * inputs + j] * x[j];
        y[i] = sum;
    }
}
