"""The benchmarks, one folder for each subject. All folders use three modules: `launch` starts
ranks, `turns` runs rounds in which the compared programs alternate, and `marks` writes tables into
pages of docs/."""
