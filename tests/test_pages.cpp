// The pages that the program writes, opened in a real browser: no errors, no requests, and the numbers of the program. Set
// STREAMBP_SCREENSHOTS to a directory to look at them.
#include "commands/text.h"

#include "tests/browser.h"

namespace streambp {
namespace {

class Pages : public Commands {
 protected:
  void SetUp() override {
    if (Browser::program().empty()) GTEST_SKIP() << "no Chromium: apt-get install chromium";
    Commands::SetUp();
    browser.emplace(dir.string() + "_profile");
  }
  void TearDown() override {
    browser.reset();
    if (!IsSkipped()) Commands::TearDown();
  }

  // What a narrow window does not show without scrolling.
  Json cut_off(const fs::path& page) {
    browser->open_page(page, {360, false});
    return browser->evaluate(
        "[...document.querySelectorAll('.wide')].filter(e => e.scrollWidth > e.clientWidth)"
        ".map(e => `${e.scrollWidth}: ${e.textContent}`)");
  }

  // Opens the page in three widths and both themes, and takes pictures.
  void look_at(const fs::path& page, const std::string& name, const std::string& fragment = "") {
    for (const int width : {360, 820, 1280}) {
      for (const bool dark : {false, true}) {
        browser->open_page(page, {width, dark}, fragment);
        EXPECT_EQ(browser->errors, std::vector<std::string>());
        EXPECT_LE(browser->evaluate("document.documentElement.scrollWidth"), width) << "wider than the window";
        browser->screenshot(name + "-" + std::to_string(width) + (dark ? "-dark" : ""));
      }
    }
  }

  std::optional<Browser> browser;
};

TEST_F(Pages, TheStepIsPlayedWithTheNumbersOfThePlan) {
  expect_ok("plan qwen3-8b --length 100000 --memory 80GiB --optimizer adamw-bf16 --timeline step.html --json plan.json",
            "The step is in step.html");
  EXPECT_LE(fs::file_size("step.html"), 1'500'000u);
  EXPECT_EQ(cut_off("step.html"), Json::array());
  look_at("step.html", "step", "#3:0.62");
  const Json usage = parse_json_file("plan.json")["usage"];
  const std::vector<std::pair<int, const char*>> walks = {
      {0, "full"}, {1, "checkpoint"}, {2, "chunked-loss"}, {3, "stream"}, {5, "fastest"}};
  for (const auto& [number, mode] : walks) {
    const std::string walk = "walks[" + std::to_string(number) + "]";
    EXPECT_EQ(browser->evaluate(walk + ".peak"), usage[mode]["peak"]) << mode;
    EXPECT_EQ(browser->evaluate(walk + ".work.at(-1)").get<double>(), usage[mode]["flops"].get<double>()) << mode;
    EXPECT_NEAR(browser->evaluate(walk + ".duration").get<double>(), usage[mode]["seconds"]["compute"], 0.01) << mode;
    EXPECT_EQ(browser->evaluate(walk + ".seconds"), usage[mode]["seconds"]["total"]) << mode;
  }
}

// Buttons, keys and the slider move through the step; at each place the page shows what the walk does there.
TEST_F(Pages, TheStepCanBePlayedAndRead) {
  expect_ok("plan qwen3-0.6b --length 5000 --memory 8GiB --keep attention=near --chunk 2048 --timeline step.html");
  browser->open_page("step.html", {});
  const auto text = [&](const std::string& expression) { return browser->evaluate(expression).get<std::string>(); };
  EXPECT_EQ(text("what.textContent"), "Below layer 0");
  browser->evaluate("step(1, 0)");
  EXPECT_EQ(text("what.textContent"), "Layer 0: forward, rows 0 to 2,048");
  EXPECT_EQ(text("code.querySelector('mark').textContent.includes('layer.forward(') + ''"), "true");
  browser->evaluate("step(0, 1)");
  EXPECT_EQ(text("formula.querySelector('b').textContent"), "matmul");
  browser->evaluate("step(0, -1)");
  EXPECT_EQ(text("formula.querySelector('b').textContent"), "norm");
  // Backward of the last layer begins with its last chunk, computed again.
  browser->evaluate("go(now.walk.time[now.walk.pass.findIndex((p, i) => p === 'backward')] + 1e-12)");
  EXPECT_EQ(text("what.textContent"), "Layer 27: recompute the chunk, rows 4,096 to 5,000");
  EXPECT_EQ(text("code.querySelector('mark').textContent.includes('layer.recompute(') + ''"), "true");
  const Json state = browser->evaluate(
      "(() => { const s = now.walk.lives(now.walk.at(now.seconds).cell);"
      " return {dkv: [...s.dkv[27]], kv: [...s.kv[27]], below: [...s.kv[26]], inputs: s.input.map(row => "
      "row.join(''))}; })()");
  EXPECT_EQ(state["dkv"], Json({1, 1, 2}));
  EXPECT_EQ(state["kv"], Json({1, 1, 1}));
  EXPECT_EQ(state["below"], Json({0, 0, 0}));
  EXPECT_EQ(state["inputs"], Json(std::vector<std::string>(28, "111")));
  // Layer inputs that live have the bytes that the plan counted, beside the output of the last layer.
  const double saved =
      browser->evaluate("numbersAt(now.walk, now.seconds).bytes[data.kinds.indexOf('saved layer inputs')]");
  EXPECT_EQ(saved, 29.0 * 5000 * 1024 * 2);
  browser->click("button[aria-pressed=false]");  // full memory
  EXPECT_EQ(text("now.walk.name"), "Full memory");
  browser->evaluate("document.querySelector('canvas').focus()");
  const double before = browser->evaluate("now.seconds");
  browser->press("ArrowLeft");
  EXPECT_LT(browser->evaluate("now.seconds").get<double>(), before);
  browser->evaluate("(go(0), play(true), new Promise(done => setTimeout(done, 400)))");
  EXPECT_GT(browser->evaluate("now.seconds").get<double>(), 0);
  EXPECT_EQ(browser->evaluate("Object.keys(formulas).length > 20"), true);
  EXPECT_EQ(browser->errors, std::vector<std::string>());
}

// The second micro-batch keeps again what the first one kept, also chunk by chunk.
TEST_F(Pages, MicroBatchesAreAlike) {
  expect_ok("plan --family llama --layers 3 --length 6000 --device cuda --accumulate 2 --timeline step.html");
  browser->open_page("step.html", {});
  EXPECT_EQ(browser->evaluate(
                "walks.map(w => new Set(w.pass.flatMap((pass, i) => pass === 'head backward' && "
                "w.pass[i - 1] !== pass ? [w.lives(i).input.map(row => row.join('')).join(' ')] : [])))"
                ".map((states, i) => walks[i].block > 0 ? states.size <= walks[i].columns : states.size === 1)"),
            Json({true, true, true, true, true}));
}

// Every operation that a page can show has a formula, and every pass a line of streambp.cuh.
TEST_F(Pages, EveryOperationHasAFormula) {
  std::set<std::string> families;
  for (const std::string options :
       {"qwen3-0.6b --length 3000 --optimizer adamw-8bit --accumulate 3",
        "--family gemma3 --length 3000 --lora 8 --base nf4", "gpt2 --length 2000 --optimizer muon",
        "qwen3-8b --length 4096 --ranks 4 --sequence-ranks 2 --shard weights",
        "qwen3-0.6b --length 5000 --memory 4GiB --far-memory 40GiB --optimizer adamw",
        "qwen3-0.6b --length 5000 --objective dpo", "lfm2-350m --length 3000", "qwen3.5-0.8b --length 3000",
        "qwen3-30b-a3b --length 3000 --lora 8 --base nf4"}) {
    expect_ok("plan " + options + " --timeline step.html");
    browser->open_page("step.html", {});
    EXPECT_EQ(
        browser->evaluate("[...new Set(walks.flatMap(w => w.operations.map(o => o.name)))].filter(n => !formulas[n])"),
        Json::array())
        << options;
    EXPECT_EQ(browser->evaluate("Object.values(passes).filter(([, line]) => lineOf(line) < 0)"), Json::array());
    EXPECT_EQ(browser->errors, std::vector<std::string>()) << options;
    const std::string shown = browser->evaluate("kinds.concat(Object.values(passes)).join()");
    EXPECT_EQ(contains(shown, "K, V"), !(contains(options, "lfm2") || contains(options, "qwen3.5"))) << shown;
  }
}

constexpr const char* kTiny = "train --layers 1 --hidden 32 --heads 2 --length 256 --batch 1 --sample ";

// A run writes its report, also when it is resumed.
TEST_F(Pages, ARunIsReported) {
  const std::string said = expect_ok(std::string(kTiny) + "20 --steps 8 --eval-every 3 --stop-after 5 --out run");
  EXPECT_TRUE(said.ends_with("report   run/report.html\n")) << said;
  expect_ok("train --resume --out run");
  EXPECT_LE(fs::file_size("run/report.html"), 300'000u);
  look_at("run/report.html", "report");
  EXPECT_EQ(browser->evaluate("runs[0].series.loss.mean.length"), 8);
  const std::vector<double> losses = metric("run", "loss");
  for (std::size_t i = 0; i < 8; ++i)
    EXPECT_NEAR(browser->evaluate("runs[0].series.loss.mean")[i], losses[i], 1e-4 * losses[i]);
  EXPECT_EQ(browser->evaluate("runs[0].begins.map(b => b.step)"), Json({0, 5}));
  const std::string text = browser->evaluate("document.querySelector('main').textContent");
  for (const char* part : {"Complete: step 8 of 8.", "resumed after step 5", "--stop-after 5",
                           "fingerprint of the data", "fingerprint of the first gradient", "Samples"})
    EXPECT_PRED2(contains, text, part);
  EXPECT_EQ(browser->evaluate("document.querySelectorAll('canvas').length"), 8);
}

// A square for each expert of each layer, darker the more rows it has.
TEST_F(Pages, TheUseOfExpertsIsDrawn) {
  expect_ok(std::string(kTiny) + "0 --steps 4 --eval-every 2 --experts 6 --balance 0.01 --out run");
  look_at("run/report.html", "experts");
  const Json load = browser->evaluate("runs[0].expert_load");
  ASSERT_EQ(load.size(), 1u);
  const std::vector<double> shares = load[0];
  EXPECT_EQ(shares.size(), 6u);
  EXPECT_NEAR(std::accumulate(shares.begin(), shares.end(), 0.0), 6, 1e-2);
  browser->evaluate("window.squares = [...document.querySelectorAll('canvas')].at(-1)");
  const std::vector<double> drawn = browser->evaluate(
      "[0, 1, 2, 3, 4, 5].map(e => squares.getContext('2d').getImageData((e + 0.4) * squares.width / 6, "
      "squares.height / 2, 1, 1).data[3] / 255)");
  for (std::size_t e = 0; e < 6; ++e) EXPECT_NEAR(drawn[e], std::min(1.0, shares[e] / 2), 0.02) << e;
  EXPECT_PRED2(contains, std::string(browser->evaluate("document.querySelector('main').textContent")), "Balance loss");
}

// The page of runs beside each other says how long their gradients have the same bits.
TEST_F(Pages, RunsAreCompared) {
  for (const char* run : {"--out a", "--out b --mode full", "--out c --seed 2"})
    expect_ok(std::string(kTiny) + "0 --steps 5 " + run);
  expect_ok("report a b c", "comparison.html");
  look_at("comparison.html", "comparison");
  const std::string text = browser->evaluate("document.querySelector('main').textContent");
  EXPECT_PRED2(contains, text, "the same fingerprints up to step 5");
  EXPECT_PRED2(contains, text, "others from step 1 on");
}

// On-line GRPO: prompts are conversations, and no number is cut off, however small it is.
TEST_F(Pages, ARunOfGrpoIsReported) {
  fs::create_directory("run");
  std::ofstream metrics("run/metrics.jsonl"), completions("run/completions.jsonl");
  for (Index step = 1; step <= 30; ++step)
    metrics << Json{{"step", 41111 * step},
                    {"loss", (step % 3 - 1) * 1.3e-17},
                    {"rate", 2.5e-7 * double(step)},
                    {"reward", 1}}
            << "\n";
  const Json call = {{"role", "assistant"}, {"content", nullptr}, {"tool_calls", {{{"name", "add"}}}}};
  const Json conversation = {{{"role", "system"}, {"content", "Be <b>brief</b>."}},
                             {{"role", "user"}, {"content", {{{"type", "text"}, {"text", "1 + 1?"}}}}},
                             call};
  const Json many(9, {{"role", "user"}, {"content", std::string(3000, 'x')}});
  for (const Json& prompt : {conversation, Json("2 + 2 = "), many})
    completions << Json{{"step", 1}, {"prompt", prompt}, {"texts", {"4"}}, {"rewards", {1}}} << "\n";
  metrics.close(), completions.close();
  expect_ok("report run");
  browser->open_page("run/report.html", {});
  const std::string text = browser->evaluate("document.querySelector('main').textContent");
  EXPECT_PRED2(contains, text, "PromptsystemBe <b>brief</b>.user1 + 1?assistanttool_calls: {\"name\":\"add\"}Comp");
  EXPECT_PRED2(contains, text, "Prompt2 + 2 = Completion with reward 14");
  EXPECT_PRED2(contains, text, "xxx[... 7 more messages]Completion");
  for (const int width : {360, 1280}) {
    browser->open_page("run/report.html", {width});
    browser->screenshot("grpo-" + std::to_string(width));
    EXPECT_EQ(browser->errors, std::vector<std::string>());
    EXPECT_EQ(browser->evaluate(R"((() => {
      const cut = [], draw = CanvasRenderingContext2D.prototype.fillText;
      CanvasRenderingContext2D.prototype.fillText = function (words, x, y) {
        const size = this.measureText(words);
        const left = x - size.actualBoundingBoxLeft, right = x + size.actualBoundingBoxRight;
        if (left < 0 || right > this.canvas.clientWidth) cut.push(words);
        draw.call(this, words, x, y);
      };
      redrawAll();
      return cut;
    })())"),
              Json::array());
  }
}

// What a run, its data or its model names contain is data.
TEST_F(Pages, HostileTextDoesNoHarm) {
  const std::string bad = "</script><script>window.harm=1</script><img src=x onerror=harm=1>\"'&\u202e\u2028\xff";
  fs::create_directory("run");
  std::ofstream metrics("run/metrics.jsonl");
  const auto line = [&](const Json& json) {
    metrics << json.dump(-1, ' ', false, Json::error_handler_t::replace) << "\n";
  };
  Json begin = {{"command", bad},
                {"model", bad},
                {"data", bad},
                {"steps", 10},
                {"tokens", 5},
                {"objective", bad},
                {"rate", bad},
                {"planned_memory", 5},
                {"mode", bad},
                {"machine", bad},
                {"matmul_rate", 1},
                {"version", bad},
                {"date", bad},
                {"trained", bad},
                {"trained_parts", {{bad, {0}, 5}}},
                {"clip", 1},
                {"options", {{bad, bad}}}};
  line({{"step", 0}, {"begin", begin}});
  for (Index step = 1; step < 5; ++step) line({{"step", step}, {"loss", 1}, {bad, 2}, {"gradient_norm", nullptr}});
  line({{"step", 5}, {"sample", {{"prompt", bad}, {"text", std::string(10'000'000, '<')}}}});
  line({{"step", 5}, {"error", bad}});
  line({{"step", 5}, {"error", {1}}, {"begin", 5}, {"sample", "x"}, {"gradient_fingerprint", 1}});
  metrics << "{\"step\": 6, \"lo";  // killed
  metrics.close();
  std::ofstream("run/completions.jsonl") << Json{{"step", 1},
                                                 {"prompt", bad},
                                                 {"texts", {bad, std::string(3'000'000, 'x')}},
                                                 {"rewards", {1, nullptr}}}
                                                .dump(-1, ' ', false, Json::error_handler_t::replace)
                                         << "\n{\"step\": [], \"texts\": []}\nnot json\n";
  expect_ok("report run");
  EXPECT_LE(fs::file_size("run/report.html"), 300'000u);
  look_at("run/report.html", "hostile");
  EXPECT_EQ(browser->evaluate("typeof harm"), "undefined");
  EXPECT_EQ(browser->evaluate("document.querySelectorAll('img').length"), 0);
  const std::string text = browser->evaluate("document.querySelector('main').textContent");
  EXPECT_PRED2(contains, text, "<img src=x onerror=harm=1>");
  EXPECT_PRED2(contains, text, "Not a finite number: gradient norm at step 1, 2, 3, 4");
  EXPECT_PRED2(contains, text, "1 damaged line in metrics.jsonl left out");
  // The policy of the page forbids a script that came in all the same.
  EXPECT_EQ(browser->evaluate("(() => { const s = document.createElement('script'); s.textContent = 'harm = 1'; "
                              "document.body.append(s); return typeof harm; })()"),
            "undefined");
}

// A metric can have the name of a member of all objects; a field of the wrong type loses its part of the page only.
TEST_F(Pages, ADamagedFieldLeavesTheRest) {
  fs::create_directory("run"), fs::create_directory("other");
  const Json begin = {{"steps", 9},     {"clip", 0.5},   {"planned_memory", 5000001},         {"trained", "all"},
                      {"mode", "full"}, {"tokens", "x"}, {"trained_parts", {{"norm", 5, 1}}}, {"options", 5}};
  const Json first = {{"step", 1},     {"loss", 2},        {"memory", 5000001}, {"gradient_norm", 0.5},
                      {"toString", 1}, {"constructor", 2}, {"__proto__", 3},    {"evaluation_valueOf", 4}};
  write_file_atomically("run/metrics.jsonl",
                        Json{{"step", 0}, {"begin", begin}}.dump() + "\n" + first.dump() + "\n" +
                            R"({"step": 2, "evaluation_loss": 1, "utilisation": 1.25, "memory": 5000001})" + "\n");
  write_file_atomically("other/metrics.jsonl", "{\"step\": 1, \"loss\": 2}\n");
  expect_ok("report run");
  look_at("run/report.html", "damaged");
  const auto text = [&](const std::string& of) {
    return browser->evaluate("document.querySelector('" + of + "').textContent").get<std::string>();
  };
  EXPECT_EQ(text("h1"), "Run “run”");
  for (const char* part : {"Reached step 2 of 9.", "constructor", "proto", "clipped above this line"})
    EXPECT_PRED2(contains, text("main"), part);
  EXPECT_EQ(browser->evaluate("document.querySelectorAll('canvas').length"), 8);
  EXPECT_PRED2(contains, text("main"), "A share above 100%: the machine was busy");
  EXPECT_PRED2(contains, text("details"), "This part cannot be shown, because its data is damaged");
  // The curves' colours have a key, and no step is above the planned memory or the limit of the norm.
  EXPECT_PRED2(contains, text("figure"), "Losstrainingheld-out");
  EXPECT_EQ(browser->evaluate("runs[0].series.memory.mean[0] > rounded(5000001, 5)"), false);
  expect_ok("report run other");
  browser->open_page("comparison.html", {});
  EXPECT_EQ(browser->errors, std::vector<std::string>());
  EXPECT_PRED2(contains, text("main"), "The run “other”");
}

TEST_F(Pages, ACertificateIsAPage) {
  expect_ok("verify --family qwen3 --oracle --length 300 --html verified.html --json verified.json",
            "The page is verified.html");
  look_at("verified.html", "verified");
  const Json tensors = parse_json_file("verified.json")["tensors"];
  EXPECT_EQ(browser->evaluate("document.querySelectorAll('.field').length"), tensors.size());
  browser->evaluate("document.querySelector('.field').focus()");
  EXPECT_PRED2(contains, browser->evaluate("document.querySelector('output').textContent").get<std::string>(),
               "model.layers.3.input_layernorm.weight: distance ");
  expect_ok("verify --certificate modes --html certificate.html");
  look_at("certificate.html", "certificate");
  EXPECT_PRED2(contains, browser->evaluate("document.querySelector('main').textContent").get<std::string>(),
               "same bits");
  expect_failed("verify --certificate modes --html page.json", "let it end in .html");
}

// The lesson's formulas give the planned memory, its recorded step is the program's, and its pictures answer.
TEST_F(Pages, TheLessonIsRight) {
  const fs::path lesson = fs::path(STREAMBP_SOURCE) / "docs/lesson.html";
  look_at(lesson, "lesson");
  EXPECT_EQ(cut_off(lesson), Json::array());
  for (const auto& [length, layers, heads, chunk, vocab] :
       std::vector<std::array<Index, 5>>{{16384, 12, 12, 512, 32000},
                                         {1024, 2, 4, 256, 256},
                                         {8192, 24, 16, 1024, 151936},
                                         {131072, 48, 64, 4096, 128256},
                                         {1048576, 1, 32, 8192, 8192}}) {
    const std::string model =
        format("--family llama --layers %ld --heads %ld --kv-heads %ld --hidden %ld --mlp %ld --vocab %ld", layers,
               heads, ceil_div(heads, 4), 64 * heads, 176 * heads, vocab);
    expect_ok(format("plan %s --length %ld --chunk %ld --device cpu --dtype f32 --matmul 1 --json plan.json",
                     model.c_str(), length, chunk));
    const Json usage = parse_json_file("plan.json")["usage"];
    for (Mode mode : kModes) {
      const double said = browser->evaluate(
          format("peak('%s', {length: %ld, layers: %ld, heads: %ld, chunk: %ld, vocab: %ld}).reduce((a, b) => a + b)",
                 name(mode), length, layers, heads, chunk, vocab));
      const double planned = usage[name(mode)]["peak"];
      EXPECT_NEAR(said, planned, 0.02 * planned) << name(mode) << ", " << model << ", " << length;
    }
  }
  expect_ok(browser->evaluate("data.command").get<std::string>().substr(9) + " --timeline step.html");
  const Json recorded = browser->evaluate("data.walks.map(w => w.timeline)");
  const std::string source = browser->evaluate("data.source");
  browser->open_page("step.html", {});
  EXPECT_EQ(browser->evaluate("[0, 1, 3].map(i => data.walks[i].timeline)"), recorded)
      << "scripts/make_lesson.py updates it";
  EXPECT_EQ(browser->evaluate("data.source"), source) << "scripts/make_lesson.py updates it";

  browser->open_page(lesson, {});
  EXPECT_NEAR(browser->evaluate("walks[2].flops / walks[0].flops").get<double>(), 1.21, 0.005) << "as section 4 says";
  EXPECT_EQ(browser->evaluate("walks.length"), 3);
  EXPECT_EQ(browser->evaluate("document.querySelectorAll('ol details').length"), 3) << "each exercise has an answer";
  const auto text = [&](const std::string& id) {
    return browser->evaluate("document.querySelector('" + id + "').textContent").get<std::string>();
  };
  browser->evaluate("document.querySelectorAll('#attention .field')[rows + 7].focus()");
  EXPECT_PRED2(contains, text("#attention output"), "Row 7 reads K and V of rows 0 to 7");
  EXPECT_EQ(browser->evaluate("document.querySelectorAll('.chosen').length"), 8);
  EXPECT_PRED2(contains, text("#order"), "the gradient is exact");
  browser->click("#order button:nth-child(2)");
  EXPECT_PRED2(contains, text("#order"), "the gradient of K is off by");
  EXPECT_EQ(browser->evaluate("document.querySelectorAll('#order .bad').length"), 3);
  const Json sums = browser->evaluate(
      "[1, 2].map(column => new Set([...document.querySelectorAll('#bits tbody tr')].map(r => "
      "r.children[column].textContent)).size)");
  EXPECT_GT(sums[0], 1);
  EXPECT_EQ(sums[1], 1);
  browser->evaluate(
      "(() => { const r = document.querySelector('#memory input'); r.value = 0; r.dispatchEvent(new Event('input')); "
      "})()");
  EXPECT_PRED2(contains, text("#memory"), "1,024");
  EXPECT_EQ(browser->errors, std::vector<std::string>());
}

}  // namespace
}  // namespace streambp
