"""Recognize attention that is written out in products and softmax, and replace it by one operator."""
