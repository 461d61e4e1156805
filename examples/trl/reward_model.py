import posttrain

run = posttrain.reward(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    data="trl-lib/ultrafeedback_binarized",
)
