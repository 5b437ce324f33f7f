"""How a call of a public function reaches a kernel: checks, autocast, the operator, what backward keeps."""
