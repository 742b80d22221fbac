static inline void policy_layernorm(float *v, int n, const float *scale, const float *shift,
                                    float epsilon)
{
    float mean = 0.0f, variance = 0.0f;
    for (int i = 0; i < n; i++) mean += v[i] / (float)n;
    for (int i = 0; i < n; i++) variance += (v[i] - mean) * (v[i] - mean) / (float)n;
    for (int i = 0; i < n; i++)
        v[i] = (v[i] - mean) / sqrtf(variance + epsilon) * scale[i] + shift[i];
}
