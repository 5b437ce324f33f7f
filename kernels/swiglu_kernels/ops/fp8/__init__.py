"""The block with fp8 products: swiglu_glu_fp8 and swiglu_mlp_fp8."""
