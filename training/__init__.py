"""Scripts that train the networks of this project. They are not part of the package; run them from the repository.

    python -m training.digits                    # the demo's ResNet and ViT; the weights are part of the package
    python -m training.cifar10 --help            # a ResNet and a ViT on CIFAR-10; the weights go to weights/
    python -m training.tiny_imagenet --help      # a ResNet and a ViT on Tiny-ImageNet
    python -m training.imagenet_resnet50 --help  # converts a ResNet-50 that was trained on ImageNet
    python -m training.camvid --help             # a SegFormer on street scenes; its weights are not committed

All networks train on clean images with mild augmentations: none adds noise, blur or weather. Stochastic depth is on,
because EATA-C samples sub-networks by dropping residual branches.
"""
